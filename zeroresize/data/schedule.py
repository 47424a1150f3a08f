"""Which division holds from which step on, and what loaders have fetched: in memory that their workers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zeroresize.policy.data.division import Division

#: So many divisions are kept: those of steps that loaders may still fetch are among them.
_KEPT = 16
#: A loader has so many workers at most, and fetches less than so many steps ahead.
_MOST_WORKERS, MOST_AHEAD = 1024, 4096


class Part(NamedTuple):
    """Tell what a rank has of a step's global batch.

    ``total`` samples are in the global batch; ``num_samples`` is 0 for a rank whose micro-batches do not count;
    ``length`` and ``square`` are sums over the samples that it computes, of their lengths, or numbers, and of the
    squares of their lengths.
    """

    total: int
    num_samples: int
    num_micro_batches: int
    length: float
    square: float


class Schedule:
    """Holds the divisions of all steps that are to come, the same on all ranks; it can be pickled for workers.

    Steps are counted from 0 over all epochs.
    """

    def __init__(self, first: Division, rank: int) -> None:
        self.rank, self._least = rank, first.least
        num_ranks = len(first.pace_s)
        self._divisions = torch.zeros(_KEPT, 2 + 3 * num_ranks, dtype=torch.float64).share_memory_()
        self._parts = torch.full((MOST_AHEAD, 1 + len(Part._fields)), -1.0, dtype=torch.float64).share_memory_()
        #: How many divisions there were, steps that are over, the step with which the present epoch of a stream began,
        #: how many steps at most are fetched ahead, and the first step behind the epoch, -1 until that is known.
        self._numbers = torch.tensor([0, 0, 0, 0, -1]).share_memory_()
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
            _, squares, *of_ranks = self._divisions[(number - 1) % _KEPT].tolist()
            size = len(of_ranks) // 3
            fixed_s, pace_s, most = (tuple(of_ranks[begin : begin + size]) for begin in range(0, 3 * size, size))
            self._known[number] = Division(fixed_s, pace_s, squares, most, self._least)
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

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._numbers[1] = number

    def go_on_from(self, num_steps: int) -> None:
        """Go on behind so many steps, and forget what was fetched."""
        self._numbers[1:] = torch.tensor([num_steps, num_steps, 0, -1])
        self._fetched.zero_()
        self._parts.fill_(-1.0)

    @property
    def step_of_epoch(self) -> int:
        """How many steps of a stream's present epoch are over; 0 once all are."""
        _, over, begin, _, end = self._numbers.tolist()
        return 0 if over >= end >= begin else over - begin

    def begin_epoch(self, begin: int) -> None:
        """Let an epoch begin with this step, below 0 where the first ones were those of a training before."""
        if self._numbers[2] != begin:  # another worker may have ended it already
            self._numbers[4] = -1
        self._numbers[2] = begin

    def end_epoch(self, end: int) -> None:
        """Let the present epoch end before this step."""
        self._numbers[4] = end

    @property
    def fetched(self) -> int:
        """The first step of which no loader has fetched anything."""
        return max(int(self._fetched.max()), self.num_steps)

    @property
    def ahead(self) -> int:
        """How many steps were fetched ahead at most."""
        self.expect_ahead(self.fetched - self.num_steps)
        return int(self._numbers[3])

    def expect_ahead(self, most: int) -> None:
        """Note that so many steps may be fetched ahead."""
        self._numbers[3] = max(int(self._numbers[3]), most)

    def fetch(self, step: int, worker: int = 0) -> Division:
        """Note that a step is fetched, and return its division."""
        self._fetched[worker] = step + 1
        return self.at(step)

    def note(self, step: int, part: Part) -> None:
        """Note what this rank has of a step."""
        self._parts[step % MOST_AHEAD] = torch.tensor([float(step), *map(float, part)], dtype=torch.float64)

    @property
    def part(self) -> Part | None:
        """What this rank has of the present step; None where nothing of it was fetched."""
        step, total, samples, micro_batches, *sums = self._parts[self.num_steps % MOST_AHEAD].tolist()
        return Part(int(total), int(samples), int(micro_batches), *sums) if step == self.num_steps else None
