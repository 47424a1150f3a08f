"""Switches between strategies: torchrun --standalone --nproc-per-node 4 -m scripts.bench.strategy_switches

A LLaMA-like model on four ranks, as if two of them were one node. Every switch between five strategies is timed, in
turns with the planner's heuristics (HotSPa, Algorithm 1) and without: weights alone, and weights with gradients that
return to the optimizer's strategy. Beside it stands the planned volume / the bandwidth that is measured in the same
run: every rank sends one large buffer to the next one, all at once. This is the real counterpart of the slides' Fig. 8.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lm_examples.llama import LlamaConfig, llama_layers
from scripts.bench.common import machine, save, time_slowest_rank
from zeroresize.comm.collectives import start_messages
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.resharding.agreement import wait_for_all
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.switching import switch as switching

STRATEGIES = [Strategy(*degrees) for degrees in ((4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2))]
NODES = (0, 0, 1, 1)
BUFFER_BYTES = 64 * 2**20
Matrix = dict[tuple[Strategy, Strategy], float]


@contextmanager
def planned(heuristics: bool) -> Iterator[None]:
    """Switches are planned with the heuristics, or without."""
    plans = {
        "plan_weights": partial(plan_weights, heuristics=heuristics),
        "plan_gradients": partial(plan_gradients, heuristics=heuristics),
    }
    with mock.patch.multiple(switching, **plans):
        yield


def ring() -> None:
    """Every rank sends a buffer to the next one, and receives one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))
    group = dist.group.WORLD
    assert group is not None
    wait_for_all(start_messages({(rank + 1) % ranks: sent}, {(rank - 1) % ranks: received}, group))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(num_blocks=arguments.blocks, hidden_size=arguments.hidden, num_heads=8)
    models = {}
    for heuristics in (True, False):
        torch.manual_seed(0)
        models[heuristics] = SwitchableModel(
            llama_layers(config), strategies=STRATEGIES, process_group=dist.group.WORLD, nodes=NODES
        )
    bandwidths: list[float] = []
    seconds: dict[tuple[str, bool], dict[tuple[Strategy, Strategy], list[float]]] = {}
    for repeat in range(arguments.repeats + 1):
        bandwidths.append(BUFFER_BYTES / time_slowest_rank(ring))
        for (before, after), heuristics in itertools.product(itertools.permutations(STRATEGIES, 2), (True, False)):
            model = models[heuristics]
            with planned(heuristics):
                for what in ("weights", "weights and gradients"):
                    model.switch_to(before, gradients=False)
                    parameters = [one for layer in model.stage_layers.values() for one in layer.parameters()]
                    for parameter in parameters if what != "weights" else ():
                        parameter.grad = torch.ones_like(parameter)
                    switch = partial(model.switch_to, after, gradients=what != "weights")
                    switch_s = time_slowest_rank(switch)
                    for parameter in (*model.parameters(), *parameters):
                        parameter.grad = None
                    if repeat:  # the first one plans, and warms up
                        seconds.setdefault((what, heuristics), {}).setdefault((before, after), []).append(switch_s)
    tensors, num_layers = models[True].tensors, models[True].num_layers
    links = LinkSpeeds(*[statistics.median(bandwidths)] * 2)
    layouts = {strategy: strategy.layout(tensors, 4, num_layers) for strategy in STRATEGIES}
    volumes = {
        heuristics: {
            (before, after): plan_weights(
                layouts[before], layouts[after], tensors, NODES, heuristics=heuristics
            ).seconds(links)
            for before, after in itertools.permutations(STRATEGIES, 2)
        }
        for heuristics in (True, False)
    }
    medians = {
        key: {pair: statistics.median(values) for pair, values in matrix.items()} for key, matrix in seconds.items()
    }
    if dist.get_rank() == 0:
        size = sum(tensor.num_bytes for tensor in tensors)
        show(medians, volumes, f"{size / 1e6:.0f} MB of weights, {links.within_bytes_per_s / 1e9:.2f} GB/s a rank")
        save(
            "strategy_switches",
            {
                "weight_bytes": size,
                "links": asdict(links),
                **{f"{what}, heuristics {heuristics}": plain(matrix) for (what, heuristics), matrix in medians.items()},
                **{f"volume / bandwidth, heuristics {key}": plain(matrix) for key, matrix in volumes.items()},
            },
        )
    dist.destroy_process_group()


def show(medians: dict[tuple[str, bool], Matrix], volumes: dict[bool, Matrix], machine_in_words: str) -> None:
    """Every matrix as a table, and what the heuristics bring."""
    console = Console(width=140)
    console.print(machine(), machine_in_words)
    weights = {heuristics: medians["weights", heuristics] for heuristics in (True, False)}
    matrices = {
        "weights, with the heuristics, ms (bytes / bandwidth)": (weights[True], volumes[True]),
        "weights, without, ms (bytes / bandwidth)": (weights[False], volumes[False]),
        f"weights and gradients, the optimizer's strategy {STRATEGIES[0]}, with, ms": (
            medians["weights and gradients", True],
            None,
        ),
        f"weights and gradients, the optimizer's strategy {STRATEGIES[0]}, without, ms": (
            medians["weights and gradients", False],
            None,
        ),
    }
    for title, (matrix, beside) in matrices.items():
        table = Table("from \\ to", *map(str, STRATEGIES), title=title, title_justify="left")
        for before in STRATEGIES:
            cells = []
            for after in STRATEGIES:
                if before == after:
                    cells.append("")
                    continue
                more = "" if beside is None else f" ({1e3 * beside[before, after]:.0f})"
                cells.append(f"{1e3 * matrix[before, after]:.0f}{more}")
            table.add_row(str(before), *cells)
        console.print(table)
    for what in ("weights", "weights and gradients"):
        ratios = [medians[what, False][pair] / own for pair, own in medians[what, True].items()]
        console.print(f"{what}: without / with the heuristics, median {statistics.median(ratios):.2f}, "
                      f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip
    over = [own / volumes[True][pair] for pair, own in weights[True].items() if volumes[True][pair]]
    console.print(
        f"time / (bytes / bandwidth): median {statistics.median(over):.2f}, {min(over):.2f} to {max(over):.2f}"
    )


def plain(matrix: Matrix) -> dict[str, float]:
    return {f"{before} to {after}": value for (before, after), value in matrix.items()}


if __name__ == "__main__":
    main()
