"""A rank's part of a model under one strategy: modules, of which the weights are there only while it is in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.strategy.placement.strategy_groups import RankGroups
from zeroresize.strategy.placement.whole_layers import WholeLayers, WholeTensor, hollow


@dataclass(eq=False)
class Placement:
    """Holds what a rank has to do with a strategy.

    In mixed precision the optimizer steps ``masters``, and ``parameters`` compute: copies in another type, of the
    optimizer's strategy cast here, of others received. Their gradients are added to those of the masters, in the
    masters' type, whenever a backward has made them. Otherwise both are the same.

    Attributes:
        layout: of the model's tensors on all ranks.
        position: of this rank; None where it is left out.
        groups: that this rank is in.
        stage_layers: the modules of this rank's stage, by the number of the layer.
        parameters: of these modules, by the number of the tensor, in ascending order. They stay the same objects; while
            another strategy is in force their data are hollow.
        masters: what the optimizer steps while the strategy is the optimizer's, and what gradients are added to.
        is_filled: in mixed precision, whether the parameters hold weights.
    """

    strategy: Strategy
    layout: Layout
    position: Position | None
    groups: RankGroups
    stage_layers: dict[int, nn.Module]
    parameters: dict[int, nn.Parameter]
    masters: dict[int, nn.Parameter]
    is_filled: bool = False

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
        masters = parameters
        if layers.compute_dtype is not None:
            masters = {index: _master_of(one, layers.tensors[index]) for index, one in parameters.items()}
        return cls(strategy, layout, position, groups, stage_layers, parameters, masters)

    @property
    def is_mixed(self) -> bool:
        """Return whether the optimizer steps others than the parameters that compute."""
        return self.masters is not self.parameters

    @property
    def weights(self) -> dict[int, Tensor]:
        """Return what the parameters hold, or else what the masters hold, by the number of the tensor."""
        held = self.parameters if self.is_filled else self.masters
        return {number: one.data for number, one in held.items()}

    @property
    def dtypes(self) -> dict[int, torch.dtype]:
        """Return the types of the parameters, by the number of the tensor."""
        return {number: one.dtype for number, one in self.parameters.items()}

    def cast(self) -> None:
        """Fill the parameters from the masters where they are not filled; nothing where both are the same."""
        if self.is_mixed and not self.is_filled:
            self.fill({number: self.masters[number].data.to(one.dtype) for number, one in self.parameters.items()})

    def fill(self, weights: Mapping[int, Tensor]) -> None:
        """Give the parameters their weights, by the number of the tensor."""
        for number, weight in weights.items():
            self.parameters[number].data = weight
        self.is_filled = True

    def drop_gradients(self) -> None:
        """Leave no gradients here."""
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def stack(self, number: int, tensor: WholeTensor, data: Tensor, rank: int) -> Tensor:
        """View a tensor of the parameter's shape as [pre, blocks, units, inner]; see :meth:`WholeTensor.stack`."""
        return tensor.stack(data, len(self.layout.units_of(number, rank)))

    def let_go(self) -> None:
        """Leave the parameters without weights; gradients stay, and so do masters beside the parameters."""
        _empty(self.parameters)
        self.is_filled = False

    def fill_masters(self, weights: Mapping[int, Tensor]) -> None:
        """Give the masters their weights, by the number of the tensor."""
        for number, weight in weights.items():
            self.masters[number].data = weight

    def let_go_of_masters(self) -> None:
        """Leave masters and parameters without weights; gradients stay."""
        self.let_go()
        _empty(self.masters)


def _empty(parameters: Mapping[int, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.data = hollow(parameter.shape, parameter.dtype, parameter.device)


def _master_of(parameter: nn.Parameter, tensor: WholeTensor) -> nn.Parameter:
    """A parameter in the type of the undivided model, without data, to whose gradient the parameter's is added."""
    shape, device = parameter.shape, parameter.device
    master = nn.Parameter(hollow(shape, tensor.dtype, device), requires_grad=parameter.requires_grad)

    def add_gradient(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(add_gradient)
    return master


def held_bytes(placements: Sequence[Placement]) -> int:
    """Return the bytes of the parameters and gradients that are held, each memory counted once."""
    held = [one for placement in placements for one in (*placement.parameters.values(), *placement.masters.values())]
    memories = [tensor.untyped_storage() for one in held for tensor in (one.data, one.grad) if tensor is not None]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
