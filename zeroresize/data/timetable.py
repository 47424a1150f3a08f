"""How global batches are divided from which step on, and what loaders have fetched: in memory that workers share.

``B`` samples of a global batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zeroresize.policy.data.division import Division, Floats

Places = NDArray[np.int64]

#: So many divisions are kept: those of steps that loaders may still fetch are among them.
_KEPT = 16
#: A loader has so many workers at most, and fetches less than so many steps ahead.
_MOST_WORKERS, MOST_AHEAD = 1024, 4096


class Part(NamedTuple):
    """Tell what a rank has of a step's global batch.

    ``total`` samples are in the global batch; ``num_samples`` is 0 for a rank whose micro-batches do not count;
    ``over`` is how many steps of the epoch are over with this one, 0 with the last; ``length`` and ``square`` are sums
    over the samples that it computes, of their lengths, or numbers, and of the squares of their lengths.
    """

    total: int
    num_samples: int
    num_micro_batches: int
    over: int
    length: float
    square: float


class Timetable:
    """Holds how this rank's batches are cut in all steps to come; it can be pickled for workers.

    Steps are counted from 0 over all epochs.

    Args:
        first: how global batches are divided at first.
        global_batch: samples of a step on all ranks.
        num_micro_batches: of each rank in each step, unless ``micro_batch_size`` says it.
        micro_batch_size: samples of a micro-batch at most, so that ranks may have unequally many; None for no limit.
    """

    def __init__(
        self,
        first: Division,
        rank: int,
        global_batch: int,
        num_micro_batches: int = 1,
        micro_batch_size: int | None = None,
    ) -> None:
        self.rank, self.num_ranks, self._least = rank, len(first.pace_s), first.least
        self.global_batch = global_batch
        self.num_micro_batches, self.micro_batch_size = num_micro_batches, micro_batch_size
        self._divisions = torch.zeros(_KEPT, 2 + 3 * self.num_ranks, dtype=torch.float64).share_memory_()
        self._parts = torch.full((MOST_AHEAD, 1 + len(Part._fields)), -1.0, dtype=torch.float64).share_memory_()
        #: How many divisions there were, how many steps are over, and how many are fetched ahead at most.
        self._numbers = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._fetched = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._known = dict[int, Division]()
        self.add(0, first)

    def add(self, from_step: int, division: Division) -> None:
        """Let a division hold from a step on, of which no rank has fetched anything."""
        number = int(self._numbers[0])
        row = [float(from_step), division.squares, *division.fixed_s, *division.pace_s, *division.most]
        self._divisions[number % _KEPT] = torch.tensor(row, dtype=torch.float64)
        self._numbers[0] = number + 1

    def at(self, step: int) -> Division:
        """Return the division that holds in a step."""
        number = int(self._numbers[0])
        while number > 1 and self._divisions[(number - 1) % _KEPT, 0] > step:
            number -= 1
        return self._division(number)

    def _division(self, number: int) -> Division:
        """The one with a number, from 1 on."""
        if number not in self._known:
            row = self._divisions[(number - 1) % _KEPT]
            fixed_s, pace_s, most = map(tuple, row[2:].view(3, -1).tolist())
            self._known[number] = Division(fixed_s, pace_s, float(row[1]), most, self._least)
            self._known.pop(number - _KEPT, None)
        return self._known[number]

    @property
    def newest(self) -> Division:
        """The division that was added last."""
        return self._division(int(self._numbers[0]))

    @property
    def now(self) -> Division:
        """The division that holds in the present step."""
        return self.at(self.num_steps)

    @property
    def num_steps(self) -> int:
        """How many steps are over."""
        return int(self._numbers[1])

    @property
    def fetched(self) -> int:
        """The first step of which no loader has fetched anything."""
        return max(int(self._fetched.max()), self.num_steps)

    @property
    def ahead(self) -> int:
        """How many steps were fetched ahead at most."""
        self.expect_ahead(self.fetched - self.num_steps)
        return int(self._numbers[2])

    def expect_ahead(self, most: int) -> None:
        """Note that so many steps may be fetched ahead."""
        self._numbers[2] = max(int(self._numbers[2]), most)

    def fetch(self, step: int, total: int, over: int, lengths_B: Floats | None = None, worker: int = 0) -> list[Places]:
        """Return the places within a step's global batch, of ``total`` samples, that each micro-batch has here.

        A rank without samples computes the first ones, which do not count: each micro-batch has one of them.
        """
        self._fetched[worker] = step + 1
        division, rank = self.at(step), self.rank
        if lengths_B is None:
            counts = division.counts(total)
            mine = np.arange(sum(counts[:rank]), sum(counts[: rank + 1]))
        else:
            mine = division.parts(lengths_B)[rank]
        number = min(self.num_micro_batches, total)
        computed = mine if len(mine) else np.arange(number)
        if self.micro_batch_size is not None:
            number = -(-len(computed) // self.micro_batch_size)
        lengths = np.ones(len(computed)) if lengths_B is None else lengths_B[computed]
        square = 0.0 if lengths_B is None else float((lengths**2).sum())
        part = Part(total, len(mine), number, over, float(lengths.sum()), square)
        self._parts[step % MOST_AHEAD] = torch.tensor([step, *part], dtype=torch.float64)
        if lengths_B is None or number == 1:
            return np.array_split(computed, number)
        most = (float(self.micro_batch_size or len(computed)),) * number
        evenly = Division.of_counts((1.0,) * number, most)
        return [computed[places] for places in evenly.parts(division.work(lengths))]

    @property
    def part(self) -> Part | None:
        """What this rank has of the present step; None where nothing of it was fetched."""
        step, total, samples, micro_batches, over, *sums = self._parts[self.num_steps % MOST_AHEAD].tolist()
        return Part(int(total), int(samples), int(micro_batches), int(over), *sums) if step == self.num_steps else None

    @property
    def fetched_part(self) -> Part:
        """The same; a RuntimeError where nothing was fetched."""
        if (part := self.part) is None:
            raise RuntimeError(
                "no batch of this step came from the sampler: make the loader with "
                "batch_sampler=balancer.sampler(dataset), or of balancer.stream(samples), begin it after "
                "load_state_dict(), let nobody divide it again, and call step() once for each of its global batches, "
                "after all micro-batches of it (steps())"
            )
        return part

    def end_step(self) -> tuple[Part, Division]:
        """End the present step; return what this rank had of it, and how it was divided."""
        ended = self.fetched_part, self.now
        self._numbers[1] += 1
        return ended

    def go_on_from(self, num_steps: int) -> None:
        """Go on behind so many steps, and forget what was fetched."""
        self._numbers[1:] = torch.tensor([num_steps, 0])
        self._fetched.zero_()
        self._parts.fill_(-1.0)
