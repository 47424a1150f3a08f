"""Tensors of the parameters' shapes that a rank holds under one strategy, and its part of them under another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.strategy.switching.flows import FlowEnds


class Relocation:
    """Changes the layout of one kind of tensors, such as weights, on this rank; what is there stays as it is.

    Args:
        held: by the number of the tensor, under the strategy before. Of another type than is wanted, just what this
            rank sends or keeps is cast.
        dtypes: of what is wanted under the strategy after, by the number of the tensor.

    Attributes:
        new_bytes: of what :meth:`allocate` makes: tensors of which the rank holds the same part after stay the same.
    """

    def __init__(
        self,
        before: Placement,
        after: Placement,
        tensors: Sequence[WholeTensor],
        rank: int,
        held: Mapping[int, Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self._before, self._after, self._tensors, self._rank, self._held = before, after, tensors, rank, held
        self._same = {
            number: held[number]
            for number in dtypes
            if number in held
            and held[number].dtype == dtypes[number]
            and before.layout.units_of(number, rank) == after.layout.units_of(number, rank)
        }
        self._made = {number: dtype for number, dtype in dtypes.items() if number not in self._same}
        self._new: dict[int, Tensor] = {}
        self.new_bytes = sum(after.parameters[number].numel() * dtype.itemsize for number, dtype in self._made.items())

    @property
    def tensors(self) -> dict[int, Tensor]:
        """Return the tensors under the strategy after, by the number of the tensor."""
        return self._same | self._new

    def allocate(self, device: torch.device) -> None:
        """Make the new tensors."""
        for number, dtype in self._made.items():
            self._new[number] = torch.empty(self._after.parameters[number].shape, dtype=dtype, device=device)

    def ends(self) -> FlowEnds:
        """Return where the flow begins and ends; what this rank has of its new tensors already is copied now."""
        rank, before, after = self._rank, self._before, self._after
        sources: dict[int, Tensor | None] = {
            number: stack_of(before, number, self._tensors, tensor, rank) for number, tensor in self._held.items()
        }
        targets = {number: stack_of(after, number, self._tensors, one, rank) for number, one in self._new.items()}
        for number, target in targets.items():
            old, new = (one.layout.units_of(number, rank) for one in (before, after))
            source = sources.get(number)
            if source is not None and self._tensors[number].spec.division is None:
                target.copy_(source)
                continue
            begin, end = max(old.start, new.start), min(old.stop, new.stop)
            if source is not None and begin < end:
                kept = source.narrow(1, begin - old.start, end - begin)
                target.narrow(1, begin - new.start, end - begin).copy_(kept)
        return FlowEnds(sources, targets, before.layout.begins[:, rank], after.layout.begins[:, rank])


def stack_of(placement: Placement, number: int, tensors: Sequence[WholeTensor], data: Tensor, rank: int) -> Tensor:
    """View a contiguous tensor of a parameter's shape as [pre, units, inner]."""
    return placement.stack(number, tensors[number], data, rank).flatten(0, 1)
