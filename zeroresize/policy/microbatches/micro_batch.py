"""A micro-batch: which samples, in which rows, and how long each row is with its padding.

A sample has one length in a decoder-only model, its tokens, and two in an encoder-decoder model, those of its source
and of its target. ``A`` is that number of lengths, ``N`` the samples of a mini-batch, ``K`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Describe some rows that are computed as one.

    Attributes:
        rows: the numbers of the samples in each; several in a row are packed one behind another.
        lengths: [A] tokens of each row with padding.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, samples: Sequence[int] | Indices, lengths_NA: Indices) -> MicroBatch:
        """Return these samples, one in a row, padded to the longest of them.

        Raises:
            ValueError: for no samples.
        """
        if not len(samples):
            raise ValueError("a micro-batch of no samples is empty: at least one is needed")
        longest = lengths_NA[np.asarray(samples)].max(axis=0)
        return cls(tuple((int(sample),) for sample in samples), tuple(longest.tolist()))

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the numbers of all samples."""
        return tuple(sample for row in self.rows for sample in row)

    @property
    def size(self) -> int:
        """Return how many rows there are."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that are computed, padding included."""
        return self.size * sum(self.lengths)


class Prices(NamedTuple):
    """Holds what micro-batches take on stages.

    Attributes:
        forward_s, backward_s: [K, S] seconds.
        activation_bytes: [K, S] kept from the forward to the backward.
        workspace_bytes: [K, S] needed beside what is kept while the micro-batch runs.
    """

    forward_s: Floats
    backward_s: Floats
    activation_bytes: Floats
    workspace_bytes: Floats


class MicroBatchCosts(Protocol):
    """What the stages of a pipeline take for micro-batches of given sizes and lengths."""

    @property
    def num_stages(self) -> int:
        """Return S."""

    def prices(self, sizes_K: Indices, lengths_KA: Indices) -> Prices:
        """Return what each micro-batch takes on each stage.

        Raises:
            ValueError: for lengths that are longer than what was measured, naming them.
        """


def shapes_of(microbatches: Sequence[MicroBatch]) -> tuple[Indices, Indices]:
    """Return [K] sizes and [K, A] lengths."""
    sizes = np.array([each.size for each in microbatches], dtype=np.int64)
    return sizes, np.array([each.lengths for each in microbatches], dtype=np.int64)
