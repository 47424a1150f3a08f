"""What start checks cost of training: torchrun --nproc-per-node 2 -m scripts.bench.check_costs

Blocks of divided feed-forward layers between a replicated embedding and head train with a balancer that is off. Told is
the CPU time of the checks within that of the very steps that they are a part of, so that neither other work on the
machine counts nor waits for the other rank: of the first ten steps of some models, and of all later ones of the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from scripts.bench.common import FeedForward, parser_of, run, save
from zeroresize.control.seen_batches import SeenBatches
from zeroresize.control.start_checks import StartCheck

_FIRST = 10
_Seconds = list[tuple[float, float]]
_spent_s, _depth = 0.0, 0


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any, **named: Any) -> Any:
        global _spent_s, _depth
        _depth += 1
        begin = time.thread_time()
        try:
            return function(*inputs, **named)
        finally:
            _depth -= 1
            _spent_s += time.thread_time() - begin if not _depth else 0.0

    return call


def main() -> None:
    sizes = {"hidden": 256, "depth": 4, "batch": 16, "length": 256, "vocabulary": 4000}
    arguments = parser_of(__doc__, **sizes, models=3, steps=160).parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for owner, name in (
        *((StartCheck, name) for name in ("_training_begins", "_before_step", "after_update")),
        *((SeenBatches, name) for name in ("_model_begins", "layer_begins")),
    ):
        setattr(owner, name, _timed(getattr(owner, name)))
    first, later, step_s = [], [], []
    for number in range(arguments.models):
        first_s, later_s = _train(arguments, arguments.steps if number == 0 else _FIRST)
        first.append(sum(spent for spent, _ in first_s) / sum(whole for _, whole in first_s))
        later += later_s
        step_s += [whole for _, whole in first_s]
    of_later = sum(spent for spent, _ in later) / sum(whole for _, whole in later)
    if dist.get_rank() == 0:
        ratios = ", ".join(f"{100 * ratio:.2f}" for ratio in first)
        print(
            f"step {1e3 * statistics.median(step_s):.0f} ms; first {_FIRST}: {ratios} %; later: {100 * of_later:.3f} %"
        )
        save("check_costs", {"arguments": vars(arguments), "first": first, "later": of_later, "steps_s": step_s})
    dist.destroy_process_group()


def _train(arguments: argparse.Namespace, num_steps: int) -> tuple[_Seconds, _Seconds]:
    """Seconds of the checks, and of the whole step, of the first steps and of the later ones."""
    global _spent_s
    torch.manual_seed(0)
    hidden, vocabulary = arguments.hidden, arguments.vocabulary
    blocks = [FeedForward(hidden) for _ in range(arguments.depth)]
    model = nn.Sequential(nn.Embedding(vocabulary, hidden), *blocks, nn.Linear(hidden, vocabulary))
    zr.convert(model, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = zr.Balancer(model, optimizer, config=zr.BalanceConfig(mode="off"), process_group=dist.group.WORLD)
    rows = []
    for _ in range(num_steps):
        ids = torch.randint(vocabulary, (arguments.batch, arguments.length))
        dist.barrier()
        _spent_s, begin = 0.0, time.thread_time()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        rows.append((_spent_s, time.thread_time() - begin))
    balancer.close()
    return rows[:_FIRST], rows[_FIRST:]


if __name__ == "__main__":
    run(main)
