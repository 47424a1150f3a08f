"""Whether ranks are given the samples that an iteration was planned for: others would be padded, dropped or mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroresize.comm.exchange import Meet
from zeroresize.policy.microbatches.micro_batch import Indices
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import alike, named_ranks

#: The tokens of samples are compared in so many iterations, and then once in so many.
_FIRST, _EVERY = 10, 1000


class SampleCheck:
    """Compares samples with their planned lengths, and their tokens between the ranks of a replica.

    Args:
        meet: of all ranks.
        lengths_of: tells the lengths of a sample; None where nothing does.
    """

    def __init__(self, meet: Meet, lengths_of: Callable[[Any], Sequence[int]] | None) -> None:
        self._meet, self._lengths_of, self._num_checked = meet, lengths_of, 0

    def numbers(self, samples: Sequence[Any], wanted: Sequence[int], lengths_NA: Indices) -> list[float]:
        """Return what ranks compare of this rank's samples: three numbers for :meth:`require`."""
        planned = np.asarray(lengths_NA)
        if len(samples) != len(planned):
            return [-1.0, float(len(samples)), 0.0]
        for sample in wanted:
            for axis, length in enumerate(self._lengths_of(samples[sample]) if self._lengths_of else ()):
                if length != planned[sample, axis]:
                    return [1.0 + sample * planned.shape[1] + axis, float(length), 0.0]
        is_due = self._num_checked < _FIRST or self._num_checked % _EVERY == 0
        return [0.0, 0.0, fingerprint(b"".join(_tokens(samples[each]) for each in wanted)) if is_due else 0.0]

    def require(
        self,
        table: Sequence[Sequence[float]],
        replicas: Sequence[int | None],
        samples: Sequence[Any],
        wanted: Sequence[int],
        lengths_NA: Indices,
    ) -> None:
        """Check what :meth:`numbers` has told of all ranks, whose replicas are given; collective where tokens differ.

        Raises:
            ValueError: on every rank, naming a sample that is not as it was planned, or not the same on all ranks.
        """
        self._num_checked += 1
        planned = np.asarray(lengths_NA)
        for rank, (place, number, _) in enumerate(table):
            if place < 0.0:
                raise ValueError(
                    f"rank {rank} was given {number:.0f} samples and {len(planned)} lengths: give the lengths of just "
                    "these samples, from which planners plan, too"
                )
            if place > 0.0:
                sample, axis = divmod(int(place) - 1, planned.shape[1])
                raise ValueError(
                    f"sample {sample} has {number:.0f} tokens on rank {rank}, and was planned with "
                    f"{planned[sample, axis]}: planners and executors have to read the same data, cut alike"
                )
        if len({(replica, row[2]) for replica, row in zip(replicas, table, strict=True)}) > len(set(replicas)):
            contents = self._meet(
                *(number for each in wanted for number in (each, fingerprint(_tokens(samples[each]))))
            )
            for replica in sorted({each for each in replicas if each is not None}):
                ranks = [rank for rank, each in enumerate(replicas) if each == replica]
                for at in range(0, min(len(contents[rank]) for rank in ranks) - 1, 2):
                    groups = alike([contents[rank][at + 1] for rank in ranks], ranks)
                    if len(groups) > 1:
                        raise ValueError(
                            f"sample {contents[ranks[0]][at]:.0f} has other tokens on {named_ranks(groups[1])} than on "
                            f"{named_ranks(groups[0])}: all ranks have to read the same data, in the same order"
                        )


def _tokens(sample: Any) -> bytes:
    """The contents of a sample as far as it is made of tensors and arrays."""
    if isinstance(sample, Tensor):
        sample = sample.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
    if isinstance(sample, np.ndarray):
        return sample.tobytes()
    return b"".join(map(_tokens, sample)) if isinstance(sample, tuple | list) else b""
