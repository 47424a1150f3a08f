"""The two halves of a micro-batch of padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from zeroresize.policy.microbatches.micro_batch import Indices, MicroBatch


def halves_of_rows(
    output: Tensor, microbatch: MicroBatch, lengths_NA: Indices, batch_of: Callable[[MicroBatch], Any]
) -> list[tuple[Tensor, Any]]:
    """Return every other row, and the rows between, padded to their own longest, with the outputs of each.

    Rows are sorted by length, so that both halves have about as many tokens.

    Args:
        output: of the last layer, [rows, length, V] with V classes, where the length is the last one of a row.
        lengths_NA: tokens of all samples of the mini-batch.
        batch_of: makes a half, on the device of the output.

    Returns:
        The outputs and the rows of both halves; nothing for outputs of another shape, and for a single row.
    """
    if output.dim() != 3 or output.shape[:2] != (microbatch.size, microbatch.lengths[-1]) or microbatch.size < 2:
        return []
    halves = []
    for first in (0, 1):
        half = _of_rows(microbatch.rows[first::2], np.asarray(lengths_NA))
        halves.append((output[first::2, : half.lengths[-1]], batch_of(half)))
    return halves


def num_counted(microbatch: MicroBatch, lengths_NA: Indices) -> int:
    """Return how many tokens of a micro-batch count in the loss: those of the last length of its samples."""
    return int(np.asarray(lengths_NA)[list(microbatch.samples), -1].sum())


def _of_rows(rows: Sequence[tuple[int, ...]], lengths_NA: Indices) -> MicroBatch:
    longest = np.max([lengths_NA[list(row)].sum(axis=0) for row in rows], axis=0)
    return MicroBatch(tuple(rows), tuple(longest.tolist()))
