"""Batches of a rank, of one order of all samples that no division changes: of a data set, or of a stream."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from zeroresize.data.schedule import Part, Schedule
from zeroresize.policy.data.division import Division, Floats

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Cutting:
    """Describe how global batches are cut, alike on all ranks, and which part this rank has.

    Attributes:
        global_batch: samples of a step on all ranks.
        num_micro_batches: of each rank in each step; None where ``micro_batch_size`` says it.
        micro_batch_size: samples of a micro-batch at most, so that ranks may have unequally many.
    """

    schedule: Schedule
    global_batch: int
    num_micro_batches: int | None
    micro_batch_size: int | None

    def fetch(self, step: int, total: int, lengths_B: Floats | None = None, worker: int = 0) -> list[Places]:
        """Return the places within a step's global batch, of ``total`` samples, that each micro-batch has here.

        A rank without samples computes the first ones, which do not count: each micro-batch has one of them.
        """
        division, rank = self.schedule.fetch(step, worker), self.schedule.rank
        if lengths_B is None:
            counts = division.counts(total)
            mine = np.arange(sum(counts[:rank]), sum(counts[: rank + 1]))
        else:
            mine = division.parts(lengths_B)[rank]
        number = min(self.num_micro_batches or 1, total)
        computed = mine if len(mine) else np.arange(number)
        if self.micro_batch_size is not None:
            number = -(-len(computed) // self.micro_batch_size)
        lengths = np.ones(len(computed)) if lengths_B is None else lengths_B[computed]
        square = 0.0 if lengths_B is None else float((lengths**2).sum())
        self.schedule.note(step, Part(total, len(mine), number, float(lengths.sum()), square))
        if lengths_B is None or number == 1:
            return np.array_split(computed, number)
        most = (float(self.micro_batch_size or len(computed)),) * number
        evenly = Division.of_counts((1.0,) * number, most)
        return [computed[places] for places in evenly.parts(division.work(lengths))]


class BalancedBatchSampler(Sampler[list[int]]):
    """Gives a rank its micro-batches of each global batch, as indices of a data set.

    :meth:`DataBalancer.sampler <zeroresize.data.data_balancer.DataBalancer.sampler>` makes it. An epoch is shuffled by
    the seed and its number, alike on all ranks and on any number of them, so a global batch holds the same samples
    however it is divided. Each iteration is an epoch, which begins once the steps of the last one are over; the first
    one after a state was loaded begins with the first global batch that was not trained on. An iteration of which
    nothing was trained on does not count.
    """

    def __init__(
        self, cutting: Cutting, num_samples: int, lengths: Floats | None, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self._cutting, self._num_samples, self._lengths = cutting, num_samples, lengths
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._epoch, self._first, self._begun_at = 0, 0, -1  # the latter: steps that were over; -1 before it begins

    @property
    def num_steps(self) -> int:
        """How many global batches an epoch has."""
        whole, rest = divmod(self._num_samples, self._cutting.global_batch)
        return whole + (rest > 0 and not self._drop_last)

    def __len__(self) -> int:
        if self._cutting.num_micro_batches is None:
            raise TypeError("with micro_batch_size nobody knows how many micro-batches an epoch will have")
        last = self._num_samples - (self.num_steps - 1) * self._cutting.global_batch
        most = self._cutting.num_micro_batches
        return (self.num_steps - 1) * most + min(most, last) if self.num_steps else 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, by which samples are shuffled; not where it goes on within one."""
        if self._num_trained or not self._first:
            self._epoch, self._first, self._begun_at = epoch, 0, -1

    def go_on_from(self, epoch: int, step: int) -> None:
        """Let the next iteration be the rest of an epoch, behind so many of its steps."""
        self._epoch, self._first = (epoch + 1, 0) if step >= self.num_steps else (epoch, step)
        self._begun_at = -1

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its steps are over."""
        return self._epoch, self._first + self._num_trained

    @property
    def _num_trained(self) -> int:
        """How many steps are over since the present iteration began."""
        return self._cutting.schedule.num_steps - self._begun_at if self._begun_at >= 0 else 0

    def __iter__(self) -> Iterator[list[int]]:
        if self._num_trained:
            self._epoch, self._first = self._epoch + 1, 0
        self._begun_at, first = self._cutting.schedule.num_steps, self._first
        begin, size = self._begun_at - first, self._cutting.global_batch
        order = np.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed << 32) + self._epoch)
            order = torch.randperm(self._num_samples, generator=generator).numpy()
        for step in range(first, self.num_steps):
            samples = order[step * size : (step + 1) * size]
            lengths_B = None if self._lengths is None else self._lengths[samples]
            for places in self._cutting.fetch(begin + step, len(samples), lengths_B):
                yield samples[places].tolist()


class BalancedStream(IterableDataset[list[Any]]):
    """Gives a rank its micro-batches of each global batch of a stream, as lists of samples.

    :meth:`DataBalancer.stream <zeroresize.data.data_balancer.DataBalancer.stream>` makes it.
    """

    def __init__(self, cutting: Cutting, samples: Iterable[Any], drop_last: bool, prefetch_factor: int) -> None:
        self._cutting, self._samples, self._drop_last = cutting, samples, drop_last
        self._prefetch_factor = prefetch_factor
        self.epoch, self._first, self._process = 0, 0, -1
        #: Where the next iteration begins: of workers, when they are started.
        self.begin = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, of which the stream hears, too, if it has a ``set_epoch``.

        Not where it goes on within one.
        """
        if not self._first:
            self.epoch = epoch
            if hasattr(self._samples, "set_epoch"):
                self._samples.set_epoch(epoch)

    def go_on_from(self, epoch: int, step: int) -> None:
        """Let the next iteration be the rest of an epoch, behind so many of its steps, which are read all the same."""
        self._first = 0
        self.set_epoch(epoch)
        self.begin, self._first = self._cutting.schedule.num_steps, step

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its steps are over."""
        return self.epoch, self._first or self._cutting.schedule.step_of_epoch

    def step_ended(self) -> None:
        """Let the next iteration begin behind the steps that are over."""
        self.begin, self._first = self._cutting.schedule.num_steps, 0

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and self._process == os.getpid():
            raise RuntimeError("workers of a balanced stream live for one epoch: leave persistent_workers=True out")
        self._process = os.getpid()
        schedule, size, first = self._cutting.schedule, self._cutting.global_batch, self._first
        begin = (self.begin if info is not None else schedule.num_steps) - first
        schedule.begin_epoch(begin)
        schedule.expect_ahead(num_workers * (self._prefetch_factor + 1))
        samples, number = iter(self._samples), 0
        next(itertools.islice(samples, first * size, first * size), None)
        batch, step = self._next(samples), begin + first
        while batch:
            following = self._next(samples)
            if not following:  # known before the last batch is handed on
                schedule.end_epoch(step + 1)
            for places in self._cutting.fetch(step, len(batch), worker=worker):
                if number % num_workers == worker:
                    yield [batch[place] for place in places]
                number += 1
            batch, step = following, step + 1

    def _next(self, samples: Iterator[Any]) -> list[Any]:
        """The next global batch; empty where there is none."""
        batch = list(itertools.islice(samples, self._cutting.global_batch))
        return [] if self._drop_last and len(batch) < self._cutting.global_batch else batch
