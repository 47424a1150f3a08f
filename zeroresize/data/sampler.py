"""Batches of a rank, of one order of all samples that no division changes: of a data set, or of a stream."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from zeroresize.data.timetable import Part, Timetable
from zeroresize.policy.data.division import Floats
from zeroresize.utils.hashing import digest


class Epochs:
    """Knows where training is in its data, of which each iteration is an epoch.

    The first iteration after a state was loaded begins with the first global batch that was not trained on.

    Attributes:
        data: what must be the same where training goes on from a state.
        mark: of what else must be the same on all ranks.
    """

    def __init__(self, timetable: Timetable, data: dict[str, str], mark: bytes) -> None:
        self._timetable, self.data, self.mark = timetable, {**data, "global_batch": str(timetable.global_batch)}, mark
        self._epoch, self._over, self._goes_on = 0, 0, False  # the latter: within an epoch, of a state that was loaded
        self._begin = 0  # number of the next step: workers have it of when they were started

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch; not where it goes on within one."""
        if not self._goes_on:
            self._epoch, self._over = epoch, 0

    def go_on_from(self, epoch: int, step: int) -> None:
        """Let the next iteration be the rest of an epoch, behind so many of its steps."""
        self._goes_on = False
        self.set_epoch(epoch)
        self._over, self._goes_on, self._begin = step, step > 0, self._timetable.num_steps

    def step_ended(self, part: Part) -> None:
        """Let the next iteration begin behind the steps that are over."""
        self._over, self._goes_on, self._begin = part.over, False, self._timetable.num_steps

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its steps are over."""
        return self._epoch, self._over


class BalancedBatchSampler(Epochs, Sampler[list[int]]):
    """Gives a rank its micro-batches of each global batch, as indices of a data set.

    :meth:`DataBalancer.sampler <zeroresize.data.data_balancer.DataBalancer.sampler>` makes it. An epoch is shuffled by
    the seed and its number, alike on all ranks and on any number of them, so a global batch holds the same samples
    however it is divided. The next epoch begins once the steps of the last one are over. An iteration of which nothing
    was trained on does not count.

    Attributes:
        repeats: whether the next iteration begins with all that its epoch has trained on, for those that skip it.
    """

    def __init__(
        self, timetable: Timetable, num_samples: int, lengths: Floats | None, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        data = {"samples": str(num_samples), "seed": str(seed), "shuffle": str(shuffle)}
        super().__init__(timetable, data, digest(str(drop_last), b"" if lengths is None else lengths.tobytes()))
        self._num_samples, self._lengths, self._seed, self._shuffle = num_samples, lengths, seed, shuffle
        whole, rest = divmod(num_samples, timetable.global_batch)
        #: How many global batches an epoch has.
        self.num_steps = whole + (rest > 0 and not drop_last)
        self.repeats = False

    def __len__(self) -> int:
        if self._timetable.micro_batch_size is not None:
            raise TypeError("with micro_batch_size nobody knows how many micro-batches an epoch will have")
        last = self._num_samples - (self.num_steps - 1) * self._timetable.global_batch
        most = self._timetable.num_micro_batches
        return (self.num_steps - 1) * most + min(most, last) if self.num_steps else 0

    def go_on_from(self, epoch: int, step: int) -> None:
        """Let the next iteration be the rest of an epoch, or the next one where it has no more steps than these."""
        super().go_on_from(*((epoch, step) if step < self.num_steps else (epoch + 1, 0)))

    def step_ended(self, part: Part) -> None:
        """Let the next iteration be the next epoch, and begin behind the steps that are over."""
        super().step_ended(part)
        self._epoch += part.over == 0

    def __iter__(self) -> Iterator[list[int]]:
        if not self._goes_on and self._over:
            self._epoch, self._over = self._epoch + 1, 0
        begin, size = self._begin - self._over, self._timetable.global_batch
        order = np.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed << 32) + self._epoch)
            order = torch.randperm(self._num_samples, generator=generator).numpy()
        first, self.repeats = (0 if self.repeats else self._over), False
        for step in range(first, self.num_steps):
            samples = order[step * size : (step + 1) * size]
            lengths_B = None if self._lengths is None else self._lengths[samples]
            for places in self._timetable.fetch(begin + step, len(samples), (step + 1) % self.num_steps, lengths_B):
                yield samples[places].tolist()


class BalancedStream(Epochs, IterableDataset[list[Any]]):
    """Gives a rank its micro-batches of each global batch of a stream, as lists of samples.

    :meth:`DataBalancer.stream <zeroresize.data.data_balancer.DataBalancer.stream>` makes it. What is skipped, as it was
    trained on before a state was saved, is read all the same.
    """

    def __init__(self, timetable: Timetable, samples: Iterable[Any], drop_last: bool, prefetch_factor: int) -> None:
        super().__init__(timetable, {"samples": "a stream"}, digest(str(drop_last)))
        self._samples, self._drop_last, self._prefetch_factor, self._process = samples, drop_last, prefetch_factor, -1

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, of which the stream hears, too, if it has a ``set_epoch``.

        Not where it goes on within one.
        """
        super().set_epoch(epoch)
        if not self._goes_on and hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and self._process == os.getpid():
            raise RuntimeError("workers of a balanced stream live for one epoch: leave persistent_workers=True out")
        self._process = os.getpid()
        timetable, size, step = self._timetable, self._timetable.global_batch, self._begin
        first = self._over if self._goes_on else 0
        timetable.expect_ahead(num_workers * (self._prefetch_factor + 1))
        samples, number = iter(self._samples), 0
        next(itertools.islice(samples, first * size, first * size), None)
        batch, over = self._next(samples), first
        while batch:
            following = self._next(samples)
            over = over + 1 if following else 0  # known before the last batch is handed on
            for places in timetable.fetch(step, len(batch), over, worker=worker):
                if number % num_workers == worker:
                    yield [batch[place] for place in places]
                number += 1
            batch, step = following, step + 1

    def _next(self, samples: Iterator[Any]) -> list[Any]:
        """The next global batch; empty where there is none."""
        batch = list(itertools.islice(samples, self._timetable.global_batch))
        return [] if self._drop_last and len(batch) < self._timetable.global_batch else batch
