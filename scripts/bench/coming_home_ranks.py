"""Whether units come home on two real ranks: OMP_NUM_THREADS=1 python -m scripts.bench.coming_home_ranks

A small model of plain layers, one rank slowed by sleeps after its products (``--by sleeps``) or by processes that are
busy on its core (``--by processes``), from some steps before an update until some steps after its units have moved.
``--begins`` counts steps after an update, ``--ends`` steps after units have moved. For every offset: in how many steps
all units were home, and steps from then on as a ratio to those before.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from scripts.bench.common import FeedForward, parser_of, pin_to_core, results_of_ranks, run, show
from vit_examples.contention import Contention
from zeroresize.injection import StragglerInjector

_WARM_UP, _MOST_WAITED, _WATCHED = 60, 100, 60


def measure_offset(options: argparse.Namespace, begins: int, ends: int) -> tuple[bool, int | None, float]:
    """(whether units moved, in how many steps all were home, steps from then on as a ratio to those before)."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(*[FeedForward(options.hidden) for _ in range(options.blocks)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = zr.BalanceConfig(update_every=options.update_every)
    zr.convert(model, process_group=group)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
    x = torch.randn(options.tokens, options.hidden)

    def timed_step() -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        return time.perf_counter() - began

    injector = StragglerInjector(model, process_group=group, chi={}) if options.by == "sleeps" else None
    slowness = injector or Contention(core_index=group.rank())

    def set_slow(is_slow: bool) -> None:
        if injector is not None:
            injector.set_chi({1: options.chi} if is_slow else {})
        elif group.rank() == 1:
            slowness.chi = 1.0 + options.processes * is_slow

    has_moved, home_at = False, None
    seconds: list[float] = []
    with slowness:
        before = [timed_step() for _ in range(_WARM_UP + begins)][20:]
        set_slow(True)
        for _ in range(_MOST_WAITED):
            timed_step()
            has_moved = set(balancer.plan.owned) != {1.0}
            if has_moved:
                break
        for _ in range(ends):
            timed_step()
        set_slow(False)
        for step in range(_WATCHED):
            is_home = set(balancer.plan.owned) == {1.0}
            home_at = (step if home_at is None else home_at) if is_home else None
            seconds.append(timed_step())
    balancer.close()
    after = seconds[home_at:] if home_at is not None else seconds[-20:]
    return has_moved, home_at, statistics.median(after) / statistics.median(before)


def measure(rank: int, options: argparse.Namespace, tell: Callable[[object], None]) -> None:
    """One rank: every offset with a model of its own."""
    pin_to_core(rank)
    for begins, ends in itertools.product(options.begins, options.ends):
        measured = measure_offset(options, begins, ends)
        dist.barrier()
        tell((begins, ends, *measured))


def main() -> None:
    defaults = {"chi": 3.0, "processes": 3, "hidden": 768, "blocks": 2, "tokens": 520, "update_every": 5}
    parser = parser_of(__doc__, **defaults, begins=[0, 3], ends=[0, 1, 2, 3, 5])
    parser.add_argument("--by", choices=("sleeps", "processes"), default="sleeps")
    options = parser.parse_args()
    rows = [
        (begins, ends, has_moved, "never" if home_at is None else home_at, f"{ratio:.3f}")
        for begins, ends, has_moved, home_at, ratio in results_of_ranks(
            measure, 2, options, len(options.begins) * len(options.ends)
        )
    ]
    slowed = f"χ = {options.chi:g}" if options.by == "sleeps" else f"{options.processes} busy processes"
    show(slowed, ("begins", "ends after the move", "moved", "home after steps", "step then / before"), rows)


if __name__ == "__main__":
    run(main)
