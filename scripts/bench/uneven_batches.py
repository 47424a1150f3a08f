"""Batches divided by speed: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m scripts.bench.uneven_batches

Copies of a model under DistributedDataParallel train in the same processes and take turns; then the last rank is slow:
its operations sleep, or with ``--kind contend`` real processes share its core (χ of 2 and 4 are 1 and 3 of them).
``plain`` has torch's DistributedSampler, ``fixed`` the counts of which a step is shortest, by measuring those from the
ratio of the speeds down in the same run (which no division of samples beats), ``balanced`` a DataBalancer, whose first
``--first`` steps are those from the first slow one on. Four ranks on two cores want ``--everyone 8``: all sleep so many
times as long as they compute. ``--chi 1`` compares with nobody slow.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zeroresize as zr
from scripts.bench.common import in_turns, interval_of_ratio, join_ranks, parser_of, pin_to_core, run, save, show
from vit_examples.contention import Contention
from zeroresize.injection import SlowOps
from zeroresize.policy.data.division import Division

CLASSES = 10


class Copy:
    """A model in training, plainly or in batches that a balancer divides."""

    def __init__(self, options: Any, kind: str) -> None:
        torch.manual_seed(0)
        sizes = [options.hidden] * options.depth
        layers = chain.from_iterable((nn.Linear(size, size), nn.GELU()) for size in sizes)
        self.model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(options.hidden, CLASSES)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator, number = torch.Generator().manual_seed(1), 64 * options.global_batch
        targets = torch.randint(CLASSES, (number, options.tokens), generator=generator)
        rows = torch.randn(options.global_batch, options.tokens, options.hidden, generator=generator)
        self.dataset = TensorDataset(rows.repeat(64, 1, 1), targets)
        self.balancer: zr.DataBalancer | None = None
        if kind == "plain":
            sampler: Any = DistributedSampler(self.dataset)
            size = options.global_batch // dist.get_world_size()
            self.loader = DataLoader(self.dataset, batch_size=size, sampler=sampler)
        else:
            even = [options.global_batch // dist.get_world_size()] * dist.get_world_size()
            self.balancer = zr.DataBalancer(
                self.model,
                self.optimizer,
                global_batch=options.global_batch,
                counts=even if kind == "fixed" else None,
                update_every=options.update_every,
            )
            self.loader = DataLoader(self.dataset, batch_sampler=self.balancer.sampler(self.dataset))
        self.batches = self._endless()

    def _endless(self) -> Any:
        while True:
            yield from self.loader

    def divide(self, counts: tuple[int, ...]) -> None:
        """Let all steps that come be divided so."""
        assert self.balancer is not None
        timetable = self.balancer._timetable
        timetable.add(timetable.num_steps, Division.of_counts(counts))

    def steps(self, number: int) -> list[float]:
        """Seconds of some steps."""
        seconds = []
        for _ in range(number):
            begin = time.perf_counter()
            inputs, targets = next(self.batches)
            loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            if self.balancer is not None:
                loss = loss * self.balancer.loss_scale()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.balancer is not None:
                self.balancer.step()
            seconds.append(time.perf_counter() - begin)
        return seconds


class Slowness:
    """Makes the last rank slow, and all ranks sleep beside what they compute."""

    def __init__(self, options: Any) -> None:
        self.everyone, self.is_last = options.everyone, dist.get_rank() == dist.get_world_size() - 1
        self.slow: Any = Contention(core_index=dist.get_rank()) if options.kind == "contend" else SlowOps(scope="all")
        self.slow.__enter__()
        self(1.0)

    def __call__(self, chi: float) -> None:
        self.slow.chi = self.everyone * (chi if self.is_last else 1.0)
        dist.barrier()


def below(counts: tuple[int, ...], number: int) -> list[tuple[int, ...]]:
    """Divisions that give the last rank from a quarter of these samples up to a fifth more, others the rest."""
    divisions, total = dict[tuple[int, ...], None](), sum(counts)
    for at in range(number):
        last = max(round(counts[-1] * (0.25 + 0.95 * at / (number - 1))), 1)
        others = Division.of_counts((1.0,) * (len(counts) - 1)).counts(total - last)
        divisions[(*others, last)] = None
    return list(divisions)


def main() -> None:
    parser = parser_of(
        __doc__,
        **{"hidden": 512, "depth": 4, "tokens": 16, "global_batch": 64, "chi": [2.0, 4.0], "first": 200},
        **{"rounds": 8, "steps": 5, "update_every": 10, "everyone": 1.0, "kind": "sleep", "divisions": 7},
    )
    options = parser.parse_args()
    join_ranks(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    if options.kind != "contend":
        pin_to_core()
    slow = Slowness(options)
    copies = {kind: Copy(options, kind) for kind in ("plain", "fixed", "balanced")}
    for copy in copies.values():
        copy.steps(2 * options.update_every)
    rows, results = [], []
    for chi in options.chi:
        result = compare(options, copies, slow, chi)
        results.append({"chi": chi, **result})
        rows.append([chi, *(str(value) for value in result.values())])
    if dist.get_rank() == 0:
        show("Steps, of the homogeneous one [95 %]", list(results[0]), rows)
        save("uneven_batches", {"options": vars(options), "results": results})
    dist.destroy_process_group()


def compare(options: Any, copies: dict[str, Copy], slow: Slowness, chi: float) -> dict[str, Any]:
    """What steps take with the last rank slow: the first ones, then settled, in turns."""
    plain, fixed, balanced = copies.values()
    num_ranks = dist.get_world_size()
    even = (options.global_batch // num_ranks,) * num_ranks
    fixed.divide(even)
    steps = {name: partial(copy.steps, options.steps) for name, copy in copies.items()}
    if chi == 1.0:
        turns = {name: list(chain(*each)) for name, each in in_turns(steps, options.rounds).items()}
        return {name: shown(turns[name], turns["plain"]) for name in ("fixed", "balanced")}

    def homogeneous() -> list[float]:
        slow(1.0)
        seconds = plain.steps(options.steps)
        slow(chi)
        return seconds

    slow(chi)
    first_s = sum(balanced.steps(options.first))
    best = Division.of_counts((*((1.0,) * (num_ranks - 1)), 1.0 / chi)).counts(options.global_batch)
    divisions = {str(counts): counts for counts in below(best, options.divisions)}

    def divided(counts: tuple[int, ...]) -> list[float]:
        fixed.divide(counts)
        return fixed.steps(options.steps)

    scanned = in_turns({name: partial(divided, counts) for name, counts in divisions.items()}, options.rounds)
    medians = {name: statistics.median(chain(*each)) for name, each in scanned.items()}
    least = min(medians, key=medians.__getitem__)
    choice = [divisions[least]]
    dist.broadcast_object_list(choice, src=0)
    fixed.divide(choice[0])
    settled = balanced.balancer.counts
    turns = {
        name: list(chain(*each))
        for name, each in in_turns({"homogeneous": homogeneous, **steps}, options.rounds).items()
    }
    slow(1.0)
    back_s = balanced.steps(4 * options.update_every)
    usual = {name: statistics.median(seconds) for name, seconds in turns.items()}
    bound_s = min(usual["fixed"], medians[least])
    removable_s = usual["plain"] - bound_s
    return {
        "plain": shown(turns["plain"], turns["homogeneous"]),
        "fixed": f"{shown(turns['fixed'], turns['homogeneous'])} {choice[0]}",
        "balanced": f"{shown(turns['balanced'], turns['homogeneous'])} {settled}",
        "of the bound": f"{usual['balanced'] / bound_s:.3f}",
        "removed, settled": f"{(usual['plain'] - usual['balanced']) / removable_s:.2f}",
        "removed at first": f"{(usual['plain'] - first_s / options.first) / removable_s:.2f}",
        "afterwards": str(balanced.balancer.counts),
        "last step": f"{back_s[-1] / usual['homogeneous']:.2f}",
    }


def shown(seconds: list[float], others: list[float]) -> str:
    low, high = interval_of_ratio(seconds, others)
    return f"{statistics.median(seconds) / statistics.median(others):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    run(main)
