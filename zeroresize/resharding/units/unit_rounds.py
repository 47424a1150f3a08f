"""Units are packed into one message for each pair of ranks, in rounds of bounded memory.

A **stack** is one part of a tensor, seen as [pre, units, inner]: ``pre`` the size of the dimensions before the one that
holds units, ``inner`` the rows of one unit times the size of the dimensions after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeroresize.layers.segment import UnitTensor
from zeroresize.plan.ownership import Indices
from zeroresize.resharding.transport import Pair

#: Runs of neighbouring units are copied one by one, up to so many; more are gathered by index.
_MOST_RUNS = 16


@dataclass(frozen=True)
class UnitSlice:
    """Names units of a moving segment that travel from one rank to another in one round.

    Attributes:
        segment: which of the moving segments.
        units: ascending.
    """

    segment: int
    units: Indices


#: The units that each pair of ranks exchanges in a round, by segment.
UnitRound = Mapping[Pair, Sequence[UnitSlice]]


def unit_rounds(plans: Sequence[Mapping[Pair, Indices]], unit_bytes: Sequence[int], max_bytes: int) -> list[UnitRound]:
    """Divide transfers into rounds, in each of which no rank sends and receives more than ``max_bytes`` together.

    A unit that is larger than that travels alone: then a rank has one unit in a round.

    Args:
        plans: for every segment what :func:`~zeroresize.plan.ownership.transfer_plan` returns.
        unit_bytes: for every segment, what belongs to one unit in all tensors that travel.
    """
    left = [
        (pair, segment, units, 0) for segment, plan in enumerate(plans) for pair, units in plan.items() if len(units)
    ]
    rounds: list[UnitRound] = []
    while left:
        loads: dict[int, int] = {}
        slices: dict[Pair, list[UnitSlice]] = {}
        rest = []
        for pair, segment, units, begin in left:
            size = max(unit_bytes[segment], 1)
            used = max(loads.get(rank, 0) for rank in pair)
            num_units = min((max_bytes - used) // size, len(units) - begin)
            if num_units < 1 and used == 0:
                num_units = 1
            if num_units > 0:
                slices.setdefault(pair, []).append(UnitSlice(segment, units[begin : begin + num_units]))
                for rank in pair:
                    loads[rank] = loads.get(rank, 0) + num_units * size
                begin += num_units
            if begin < len(units):
                rest.append((pair, segment, units, begin))
        rounds.append(slices)
        left = rest
    return rounds


def stacks(tensor: Tensor, where: UnitTensor, num_units: int) -> list[Tensor]:
    """Return the stack of every part of ``tensor``; views of it if it is contiguous."""
    pre, post = math.prod(tensor.shape[: where.dim]), math.prod(tensor.shape[where.dim + 1 :])
    parts = tensor.reshape(pre, tensor.shape[where.dim], post).split([num_units * rows for rows in where.rows], dim=1)
    return [part.unflatten(1, (num_units, rows)).flatten(2) for part, rows in zip(parts, where.rows, strict=True)]


def copy_units(target: Tensor, at: Indices, source: Tensor, of: Indices) -> None:
    """Copy the units ``of`` a source stack to the places ``at`` of a target stack; both ascending."""
    if not len(of):
        return
    ends = np.flatnonzero((np.diff(of) != 1) | (np.diff(at) != 1)) + 1
    if len(ends) < _MOST_RUNS:
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(of)], strict=True):
            run = source.narrow(1, int(of[begin]), end - begin)
            target.narrow(1, int(at[begin]), end - begin).copy_(run, non_blocking=True)
        return
    gathered = source.index_select(1, torch.from_numpy(of).to(source.device)).to(target.device)
    target.index_copy_(1, torch.from_numpy(at).to(target.device), gathered)


@dataclass(frozen=True)
class UnitStack:
    """Holds a part of one tensor of a moving segment on this rank, before and after the move.

    Attributes:
        dtype: of it, on every rank.
        old: what this rank holds, a stack; None stands for zeros.
        new: what it will hold, a stack.
    """

    segment: int
    dtype: torch.dtype
    old: Tensor | None
    new: Tensor

    def part(self, message: Tensor, begin: int, num_units: int) -> Tensor:
        """Return a view of a message [bytes]: the stack of ``num_units`` units that begins at byte ``begin``."""
        pre, _, inner = self.new.shape
        size = pre * num_units * inner * self.dtype.itemsize
        return message[begin : begin + size].view(self.dtype).view(pre, num_units, inner)


def parts_of(
    message: Tensor, slices: Sequence[UnitSlice], tensors: Sequence[UnitStack]
) -> list[tuple[UnitSlice, int, Tensor]]:
    """Return where everything lies in a message [bytes]: (unit_slice, which of the tensors, its stack).

    Args:
        tensors: on every rank in one order, larger elements first, so that all lie aligned.
    """
    parts, begin = [], 0
    by_segment = {unit_slice.segment: unit_slice for unit_slice in slices}
    for number, tensor in enumerate(tensors):
        unit_slice = by_segment.get(tensor.segment)
        if unit_slice is not None:
            part = tensor.part(message, begin, len(unit_slice.units))
            begin += part.numel() * part.element_size()
            parts.append((unit_slice, number, part))
    return parts
