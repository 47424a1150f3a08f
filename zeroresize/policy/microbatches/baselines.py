"""Micro-batches as they are made without planning: packing, a fixed size, equal tokens (DynaPipe, sections 2 and 8).

``N`` samples, ``A`` lengths of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Indices, MicroBatch
from zeroresize.utils.value_checks import at_least


def packed(lengths_NA: Indices, max_lengths: Sequence[int], rows_each: int) -> list[MicroBatch]:
    """Return micro-batches of rows of the maximum length, into which samples are packed one behind another.

    Each sample, in the order of the data, goes into the first row with room for all of its lengths, else into a new
    one. All rows are as long as the maximum, whatever they hold: that is what packing computes.

    Args:
        max_lengths: [A] tokens of a row.
        rows_each: of a micro-batch, but for the last one.

    Raises:
        ValueError: for a sample that is longer than a row, naming it.
    """
    at_least("rows_each", rows_each, 1)
    limits = np.asarray(max_lengths, dtype=np.int64)
    longer = np.flatnonzero((lengths_NA > limits).any(axis=1))
    if len(longer):
        raise ValueError(
            f"sample {longer[0]} has lengths {lengths_NA[longer[0]].tolist()}: rows have {limits.tolist()} at most"
        )
    rooms = np.empty((len(lengths_NA), len(limits)), dtype=np.int64)
    rows: list[list[int]] = []
    for number, lengths in enumerate(lengths_NA):
        fits = np.flatnonzero((rooms[: len(rows)] >= lengths).all(axis=1))
        if len(fits):
            row = int(fits[0])
        else:
            row = len(rows)
            rows.append([])
            rooms[row] = limits
        rows[row].append(number)
        rooms[row] -= lengths
    full = tuple(limits.tolist())
    return [
        MicroBatch(tuple(map(tuple, rows[begin : begin + rows_each])), full) for begin in range(0, len(rows), rows_each)
    ]


def of_fixed_size(lengths_NA: Indices, order: Indices, size: int) -> list[MicroBatch]:
    """Return micro-batches of so many samples, but for the last one, in this order."""
    at_least("size", size, 1)
    return [MicroBatch.of(order[begin : begin + size], lengths_NA) for begin in range(0, len(order), size)]


def of_equal_tokens(lengths_NA: Indices, order: Indices, max_tokens: int) -> list[MicroBatch]:
    """Return micro-batches of at most so many tokens, padding included, in this order; a longer sample is alone."""
    at_least("max_tokens", max_tokens, 1)
    microbatches: list[MicroBatch] = []
    begin = 0
    longest = np.zeros(lengths_NA.shape[1], dtype=np.int64)
    for place, number in enumerate(order.tolist()):
        grown = np.maximum(longest, lengths_NA[number])
        if place > begin and (place - begin + 1) * int(grown.sum()) > max_tokens:
            microbatches.append(MicroBatch.of(order[begin:place], lengths_NA))
            begin, grown = place, lengths_NA[number]
        longest = grown
    microbatches.append(MicroBatch.of(order[begin:], lengths_NA))
    return microbatches
