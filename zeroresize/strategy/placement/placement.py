"""A rank's part of a model under one strategy: modules, of which the weights are there only while it is in force."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import NamedWork, group_rank, group_size, start_all_reduce
from zeroresize.comm.groups import destroy_side_group, make_side_group
from zeroresize.plan.layout import Indices, Layout
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.resharding.agreement import sum_alike
from zeroresize.strategy.placement.whole_layers import WholeLayers, WholeTensor, hollow

#: Small gradients are summed together, up to so many bytes.
_BUCKET_BYTES = 32 * 2**20
#: So many such sums are under way at most, each with a copy of its gradients.
_MOST_UNDER_WAY = 2

_Ranks = tuple[int, ...]


class RankGroups(NamedTuple):
    """Holds the groups that a rank is in, in the order of shards, replicas and stages; left out it is alone in each."""

    tp: ProcessGroup
    dp: ProcessGroup
    pipeline: ProcessGroup


class StrategyGroups:
    """Makes the groups of a job's ranks, each once, however many strategies have it.

    Every rank makes and destroys equally many: a rank that is left out of a strategy makes groups of itself.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._job = process_group
        self._rank, self._num_ranks = group_rank(process_group), group_size(process_group)
        self._made: dict[frozenset[_Ranks], ProcessGroup] = {}

    def of(self, strategy: Strategy, numbers: Iterator[int]) -> RankGroups:
        """Return this rank's groups; collective over the job where the strategy has groups that are not made yet.

        Where that fails other ranks may have them: give up on all what this strategy needs alone, by :meth:`keep`.

        Args:
            numbers: for groups that are made, the same on all ranks; see
                :func:`~zeroresize.comm.groups.free_group_number`.
        """
        return RankGroups(*(self._group_of(division, numbers) for division in self._divisions(strategy)))

    def keep(self, strategies: Iterable[Strategy]) -> None:
        """Destroy the groups that none of these strategies has, on all ranks when none uses them any more."""
        kept = {division for strategy in strategies for division in self._divisions(strategy)}
        for division in [division for division in self._made if division not in kept]:
            destroy_side_group(self._made.pop(division))

    def _divisions(self, strategy: Strategy) -> list[frozenset[_Ranks]]:
        """Of all ranks into tensor-parallel groups, data-parallel groups and pipelines."""
        left_out = [(rank,) for rank in range(self._num_ranks) if strategy.position_of(rank) is None]
        kinds = strategy.tp_groups(), strategy.dp_groups(), strategy.pipelines()
        return [frozenset([*groups, *left_out]) for groups in kinds]

    def _group_of(self, division: frozenset[_Ranks], numbers: Iterator[int]) -> ProcessGroup:
        ranks = next(ranks for ranks in division if self._rank in ranks)
        if ranks == tuple(range(self._num_ranks)):
            return self._job
        if division not in self._made:
            self._made[division] = make_side_group(self._job, ranks, next(numbers))
        return self._made[division]


@dataclass(eq=False)
class Placement:
    """Holds what a rank has to do with a strategy.

    In mixed precision the optimizer steps ``masters``, and ``parameters`` compute: copies in another type, of the
    optimizer's strategy cast here, of others received. Their gradients are added to those of the masters, in the
    masters' type, whenever a backward has made them. Otherwise both are the same.

    Attributes:
        rank: this one.
        tensors: [P] of the undivided model.
        layout: of these on all ranks.
        position: of this rank; None where it is left out.
        stage_layers: the modules of this rank's stage, by the number of the layer.
        parameters: of these modules, by the number of the tensor, in ascending order. They stay the same objects; while
            another strategy is in force their data are hollow.
        masters: what the optimizer steps while the strategy is the optimizer's, and what gradients are added to.
        is_filled: in mixed precision, whether the parameters hold weights.
    """

    strategy: Strategy
    rank: int
    tensors: Sequence[WholeTensor]
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
            for number in strategy.partition(layers.num_layers).layers_of(position.stage):
                of_layer = {index: each for index, each in enumerate(layers.tensors) if each.spec.layer == number}
                units = {each.own_name: layout.units_of(index, rank) for index, each in of_layer.items()}
                stage_layers[number] = layers.shard(number, device, groups.tp, units)
                named = dict(stage_layers[number].named_parameters())
                parameters |= {index: named[each.own_name] for index, each in of_layer.items()}
        masters = parameters
        if layers.compute_dtype is not None:
            masters = {index: _master_of(each, layers.tensors[index]) for index, each in parameters.items()}
        return cls(strategy, rank, layers.tensors, layout, position, groups, stage_layers, parameters, masters)

    @property
    def is_mixed(self) -> bool:
        """Return whether the optimizer steps others than the parameters that compute."""
        return self.masters is not self.parameters

    @property
    def weights(self) -> dict[int, Tensor]:
        """Return what the parameters hold, or else what the masters hold, by the number of the tensor."""
        held = self.parameters if self.is_filled else self.masters
        return {number: parameter.data for number, parameter in held.items()}

    @property
    def dtypes(self) -> dict[int, torch.dtype]:
        """Return the types of the parameters, by the number of the tensor."""
        return {number: parameter.dtype for number, parameter in self.parameters.items()}

    def cast(self) -> None:
        """Fill the parameters from the masters where they are not filled; nothing where both are the same."""
        if self.is_mixed and not self.is_filled:
            self.fill({number: self.masters[number].data.to(dtype) for number, dtype in self.dtypes.items()})

    def fill(self, weights: Mapping[int, Tensor]) -> None:
        """Give the parameters their weights, by the number of the tensor."""
        for number, weight in weights.items():
            self.parameters[number].data = weight
        self.is_filled = True

    def drop_gradients(self) -> None:
        """Leave no gradients here."""
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    @property
    def begins(self) -> Indices:
        """Return [P] the first unit of each tensor here."""
        return self.layout.begins[:, self.rank]

    def units_of(self, number: int) -> range:
        """Return the units of a tensor here."""
        return self.layout.units_of(number, self.rank)

    def stack(self, number: int, data: Tensor) -> Tensor:
        """View a contiguous tensor of a parameter's shape as [pre, units, inner]; see :meth:`WholeTensor.stack`."""
        return self.tensors[number].stack(data, len(self.units_of(number))).flatten(0, 1)

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

    def sum_gradients(self) -> None:
        """Sum the masters' gradients over the replicas, in place; collective over the data-parallel group.

        A parameter without a gradient counts as one with zeros. Divided and undivided tensors are summed apart:
        undivided ones, which the ranks of a tensor-parallel group all hold, then lie in the same places of equal
        messages on all of them. With Gloo, whose order of additions depends on these alone, they stay the same to the
        last bit; NCCL may add in another order in each group.
        """
        gradients: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for number, parameter in self.masters.items():
            if parameter.requires_grad:
                known = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if known is None else known.contiguous()
                kind = parameter.dtype, self.tensors[number].spec.division is None
                gradients.setdefault(kind, []).append(parameter.grad)
        if group_size(self.groups.dp) == 1:
            return
        under_way: deque[tuple[list[Tensor], Tensor, NamedWork | None]] = deque()
        for bucket in (bucket for alike in gradients.values() for bucket in _buckets(alike)):
            if len(under_way) == _MOST_UNDER_WAY:
                _finish(*under_way.popleft())
            flat = bucket[0] if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
            under_way.append((bucket, flat, start_all_reduce(flat, self.groups.dp)))
        while under_way:
            _finish(*under_way.popleft())

    def sum_ties(self, ties: Iterable[Sequence[int]], stages: Sequence[int]) -> None:
        """Put the sum of tied tensors' gradients in place of each; collective over the pipeline, last of all sums.

        Args:
            ties: the numbers of tensors that are one parameter.
            stages: of the layers.
        """
        for tie in ties:
            here = [self.masters[number].grad for number in tie if number in self.masters]
            gradients = [gradient for gradient in here if gradient is not None]  # all or none: see sum_gradients
            for other in gradients[1:]:
                gradients[0].add_(other)
            if gradients:
                holders = sorted({stages[self.tensors[number].spec.layer] for number in tie})
                sum_alike(gradients[0], holders, holders, self.groups.pipeline)
            for other in gradients[1:]:
                other.copy_(gradients[0])


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = _BUCKET_BYTES
    for gradient in gradients:
        num_bytes = gradient.numel() * gradient.element_size()
        if size + num_bytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += num_bytes
    return buckets


def _finish(bucket: Sequence[Tensor], flat: Tensor, work: NamedWork | None) -> None:
    """Wait for the sum of a bucket, and put it where its gradients are."""
    if work is not None:
        work.wait()
    if len(bucket) > 1:
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


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
    held = [each for placement in placements for each in (*placement.parameters.values(), *placement.masters.values())]
    memories = [tensor.untyped_storage() for each in held for tensor in (each.data, each.grad) if tensor is not None]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
