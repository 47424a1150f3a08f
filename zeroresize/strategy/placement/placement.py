"""A rank's part of a model under one strategy: modules, of which the weights are there only while it is in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.strategy.placement.strategy_groups import RankGroups
from zeroresize.strategy.placement.whole_layers import WholeLayers, WholeTensor, hollow


@dataclass(frozen=True, eq=False)
class Placement:
    """Holds what a rank has to do with a strategy.

    Attributes:
        layout: of the model's tensors on all ranks.
        position: of this rank; None where it is left out.
        groups: that this rank is in.
        stage_layers: the modules of this rank's stage, by the number of the layer.
        parameters: of these modules, by the number of the tensor, in ascending order. They stay the same objects; while
            another strategy is in force their data are hollow.
    """

    strategy: Strategy
    layout: Layout
    position: Position | None
    groups: RankGroups
    stage_layers: dict[int, nn.Module]
    parameters: dict[int, nn.Parameter]

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        layout: Layout,
        layers: WholeLayers,
        groups: RankGroups,
        rank: int,
        device: torch.device,
    ) -> Placement:
        """Build this rank's modules under a strategy, without weights."""
        position = strategy.position_of(rank)
        stage_layers: dict[int, nn.Module] = {}
        parameters: dict[int, nn.Parameter] = {}
        if position is not None:
            begin, end = strategy.partition(layers.num_layers).boundaries[position.stage :][:2]
            for number in range(begin, end):
                of_layer = {index: one for index, one in enumerate(layers.tensors) if one.spec.layer == number}
                units = {one.own_name: layout.units_of(index, rank) for index, one in of_layer.items()}
                stage_layers[number] = layers.shard(number, device, groups.tp, units)
                named = dict(stage_layers[number].named_parameters())
                parameters |= {index: named[one.own_name] for index, one in of_layer.items()}
        return cls(strategy, layout, position, groups, stage_layers, parameters)

    @property
    def weights(self) -> dict[int, Tensor]:
        """Return what the parameters hold, by the number of the tensor."""
        return {number: one.data for number, one in self.parameters.items()}

    @property
    def dtypes(self) -> dict[int, torch.dtype]:
        """Return the parameters' types, by the number of the tensor."""
        return {number: one.dtype for number, one in self.parameters.items()}

    def stack(self, number: int, tensor: WholeTensor, data: Tensor, rank: int) -> Tensor:
        """View a tensor of the parameter's shape as [pre, blocks, units, inner]; see :meth:`WholeTensor.stack`."""
        return tensor.stack(data, len(self.layout.units_of(number, rank)))

    def let_go(self) -> None:
        """Leave the parameters without weights; gradients stay."""
        for parameter in self.parameters.values():
            parameter.data = hollow(parameter.shape, parameter.dtype, parameter.device)


def held_bytes(placements: Sequence[Placement]) -> int:
    """Return the bytes of the parameters and gradients that are held, each memory counted once."""
    held = [one for placement in placements for one in placement.parameters.values()]
    memories = [tensor.untyped_storage() for one in held for tensor in (one.data, one.grad) if tensor is not None]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
