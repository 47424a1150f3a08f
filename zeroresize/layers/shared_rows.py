"""Rows that several units share, as those of k and v under grouped queries, while their units are apart.

Every rank that owns a unit of a block holds its rows, and computes its own units' part of their gradients. These are
summed before they are accumulated, so that whatever reads a gradient reads the whole one, and copies stay alike bit by
bit.

``B`` blocks that a rank holds, ``S`` blocks that several ranks hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_rank
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import Indices, OwnershipMap

#: Marks a parameter whose gradients are summed.
_IS_SUMMED = "_zeroresize_is_summed"


def blocks_apart(owned: OwnershipMap, block: int) -> Indices:
    """[S]: the blocks of so many neighbouring units that several ranks hold, ascending."""
    owners = owned.owners.reshape(-1, block)
    return np.flatnonzero((owners != owners[:, :1]).any(axis=1))


def rows_counted_here(where: UnitTensor, owned: OwnershipMap, rank: int) -> Indices | None:
    """The rows that ``rank`` holds and no rank before it; None where these are all of them."""
    first = owned.owners.reshape(-1, where.block).min(axis=1)
    are_first = first[where.held(owned, rank)] == rank
    return None if are_first.all() else np.flatnonzero(np.repeat(are_first, sum(where.rows)))


class SummedGradient:
    """Sums, as a hook of a parameter, the gradients of its blocks over the ranks that hold them."""

    def __init__(self, segment: OwnedSegment, where: UnitTensor, process_group: ProcessGroup) -> None:
        self._segment, self._where, self._group = segment, where, process_group

    def __call__(self, gradient: Tensor) -> Tensor | None:
        where, owned = self._where, self._segment.owned
        apart = blocks_apart(owned, where.block)
        if not len(apart):
            return None
        held = where.held(owned, group_rank(self._group))
        here = np.flatnonzero(np.isin(held, apart))
        places = np.searchsorted(apart, held[here])
        by_row = gradient.movedim(where.dim, 0)
        stack = by_row.reshape(len(held), where.elements_of_unit).clone()  # [B, elements of a block]
        buffer = stack.new_zeros(len(apart), where.elements_of_unit)  # [S, elements of a block]
        buffer[places] = stack[here]
        all_reduce(buffer, self._group, where.name)
        stack[here] = buffer[places]
        return stack.reshape(by_row.shape).movedim(0, where.dim)


def sum_shared_gradients(segment: OwnedSegment, process_group: ProcessGroup) -> None:
    """Sum gradients of shared rows over the ranks from now on, of parameters that train."""
    for where in segment.tensors:
        parameter: Any = where.parameter
        if where.block > 1 and parameter.requires_grad and not hasattr(parameter, _IS_SUMMED):
            setattr(parameter, _IS_SUMMED, True)
            parameter.register_hook(SummedGradient(segment, where, process_group))
