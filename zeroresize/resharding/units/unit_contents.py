"""Each parameter of a segment that holds units has gradients and optimizer state that travel with the units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.layers.weight_checks import is_sharded_in
from zeroresize.optim.optimizers import stepped_tensors, torch_optimizer
from zeroresize.resharding.parameter_state import Description, ParameterState, why_of_fixed_size


class UnitContents:
    """Holds a parameter of units, with all that belongs to it on this rank.

    Args:
        unit_tensor: where the parameter is.
        num_units: how many units it holds here.
        stepped: what the optimizer steps for it, itself or its master copy; None if nothing.
        optimizer: the torch optimizer; None without one.

    Attributes:
        state: the parameter with its gradient and optimizer state.
        description: of all that, for the other ranks.

    Raises:
        ValueError: if the parameter's shape is not that of its units, or its optimizer keeps state that cannot move.
    """

    def __init__(
        self,
        unit_tensor: UnitTensor,
        num_units: int,
        stepped: Tensor | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.unit_tensor, self.num_units, self.parameter = unit_tensor, num_units, unit_tensor.parameter
        name, dim, parameter = unit_tensor.name, unit_tensor.dim, self.parameter
        size = num_units * sum(unit_tensor.rows)
        if is_sharded_in(unit_tensor.owner, parameter):
            raise ValueError(
                f"{name}: it is a DTensor, of which this rank holds a shard only, as with fully_shard, so its units "
                "cannot move"
            )
        shape = local_of(parameter).shape
        if dim >= len(shape) or shape[dim] != size:
            raise ValueError(
                f"{name}: its shape is {tuple(shape)}, but dimension {dim} must be {size}: "
                f"{num_units} units of {' + '.join(map(str, unit_tensor.rows))} rows"
            )
        if not parameter.is_leaf:
            raise ValueError(f"{name}: it is computed from other tensors (is_leaf is False), so its units cannot move")
        if reason := why_of_fixed_size(name, parameter):
            raise ValueError(f"{reason}, so its units cannot move")
        self.state = ParameterState(name, parameter, stepped, optimizer)
        self.description: Description = self.state.description(num_units)

    @property
    def name(self) -> str:
        """Return the name of the parameter."""
        return self.unit_tensor.name


def contents_of(segment: OwnedSegment, optimizer: Any, rank: int) -> list[UnitContents]:
    """Return what ``rank``, this one, holds of a segment; a parameter that is there twice counts once.

    Raises:
        ValueError: as :class:`UnitContents` does; for one parameter in two roles; for master weights of another shape.
    """
    unit_tensors: dict[int, UnitTensor] = {}
    for tensor in segment.tensors:
        known = unit_tensors.setdefault(id(tensor.parameter), tensor)
        if (known.dim, known.rows) != (tensor.dim, tensor.rows):
            raise ValueError(f"{tensor.name} and {known.name} are one parameter, but hold different units")
    parameters = {tensor.name: tensor.parameter for tensor in unit_tensors.values()}
    stepped: Mapping[str, Tensor] = {}
    inner = None
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        stepped = stepped_tensors(optimizer, parameters)
    num_units = segment.owned.counts[rank]
    return [UnitContents(tensor, num_units, stepped.get(tensor.name), inner) for tensor in unit_tensors.values()]


def layers_of(segment: OwnedSegment) -> list[nn.Module]:
    """Return the modules that hold the segment's parameters, each once."""
    return list({id(tensor.owner): tensor.owner for tensor in segment.tensors}.values())
