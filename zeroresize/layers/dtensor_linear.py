"""Column- and row-parallel layers whose parameters are DTensors, as torch's ``parallelize_module`` makes them.

They read and write what the styles of torch say, so that modules between them need not know. Where a style gathers or
reduces and scatters a sequence, or hands DTensors on, DTensor does so; products, and sums over the group of whole
activations, are this package's. ``N`` output and ``K`` input features on this rank, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from zeroresize.comm.collectives import broadcast, group_rank, group_size, message_device, require_group
from zeroresize.layers.balanced_linear import BalancedLinear, is_cast_by_autocast
from zeroresize.layers.local_parts import METHODS, OF_CHECKPOINTS, guard_dtensors, local_in_graph, local_of, on_tokens
from zeroresize.layers.splitting import part_of_rank
from zeroresize.utils.torch_private import is_dtensor, is_tensor_of_tensors, strided_shard


@dataclass(frozen=True)
class LinearLayouts:
    """Says how a split linear layer reads x and writes y, in the words of torch's parallel styles.

    Attributes:
        mesh: the one-dimensional mesh of the tensor-parallel group.
        x: placement of an x that is no DTensor.
        y: placement of what the layer returns.
        is_y_local: whether it returns the local part of y, a plain tensor, instead of a DTensor.
        adds_bias_once: for a row-parallel layer whether the bias is added to the sum, as transformers' style does,
            instead of 1/R of it to each rank's part.
    """

    mesh: DeviceMesh
    x: Placement
    y: Placement
    is_y_local: bool = True
    adds_bias_once: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearLayouts:
        """Copies of a layer are of the same mesh."""
        return self


class _DTensorLinear(BalancedLinear, nn.Linear):
    """Holds what both kinds have in common."""

    has_dtensors = True
    layouts: LinearLayouts

    @property
    def local_weight(self) -> Tensor:
        return local_of(self.weight)

    def _even_shape(self) -> torch.Size:
        """Of this rank's part in its group, also where ``fully_shard`` has divided that further."""
        sizes = list(self.weight.shape)
        sizes[self.divided_dim] = sum(self.parts or ()) * self.home[0] // self.num_units_at_home
        return torch.Size(sizes)

    def _local_in_graph(self) -> Tensor:
        return local_in_graph(self.weight)

    def divide_by(self, home: Sequence[int], begins: Sequence[int] = (), block: int = 1) -> None:
        """As of every layer; placements do not tell."""
        self.refused_at_home = METHODS
        super().divide_by(home, begins, block)

    def reset_parameters(self) -> None:
        """Draw the whole layer as ``torch.nn.Linear`` does and keep this rank's even part, also on the meta device.

        Seeded alike, the ranks together hold what one rank would. A bias that all ranks hold is rank 0's; collective
        then. What ``fully_shard`` has divided further is drawn by torch itself.
        """
        is_whole = self.weight.is_meta or not is_dtensor(self.weight)  # while ``nn.Linear`` makes it
        if is_whole or self.is_sharded_further(self.weight):
            super().reset_parameters()
            return
        self.require_home("reset_parameters() of layer")
        whole = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        rank, dim = group_rank(self.process_group), self.divided_dim
        parts = self.parts or (whole.weight.shape[dim],)
        with torch.no_grad():
            local_of(self.weight).copy_(part_of_rank(whole.weight, dim, parts, self.home, rank, self.begins))
            if self.is_column_parallel and self.bias is not None:
                local_of(self.bias).copy_(part_of_rank(whole.bias, 0, parts, self.home, rank, self.begins))
            elif self.bias is not None:
                message = whole.bias.detach().to(message_device(self.process_group, whole.bias.device))
                broadcast(message, 0, self.process_group)
                local_of(self.bias).copy_(message)

    def is_sharded_further(self, parameter: Tensor) -> bool:
        """Tell whether it is a DTensor over other ranks than the layer's, as ``fully_shard`` makes it."""
        if not is_dtensor(parameter):
            return is_tensor_of_tensors(parameter)
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        return bool(mesh.ndim > 1 or mesh != self.layouts.mesh)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _DTensorLinear:
        """As ``Module`` does for ``to``, ``half`` and such; what parameters are marked with stays.

        Torch swaps DTensors for new ones, which would lose what forbids to gather them while units are away.
        """
        marks = {name: dict(vars(parameter)) for name, parameter in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters(recurse=False):
            vars(parameter).update({key: mark for key, mark in marks[name].items() if key not in vars(parameter)})
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As ``Module`` does; what a packed layer's DTensors refuse, those in the state refuse, too."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        of_layer = [destination[f"{prefix}{name}"] for name, _ in self.named_parameters(recurse=False)]
        if self.refused_at_home:
            guard_dtensors(of_layer, are_away=False, refused=self.refused_at_home)

    def _bias_in_graph(self) -> Tensor | None:
        return None if self.bias is None else local_in_graph(self.bias)

    def _distributed(self, x: Any, placement: Placement) -> Any:
        """``x`` as a DTensor: of ``placement`` where it is a plain tensor."""
        return x if is_dtensor(x) else DTensor.from_local(x, self.layouts.mesh, [placement], run_check=False)

    def _written(self, y: Tensor, placement: Placement, bias: Tensor | None = None) -> Tensor:
        """``y`` of some placement, and ``bias``, a DTensor, added to it, as the layer is to return it."""
        layouts = self.layouts
        if placement == layouts.y and layouts.is_y_local:
            return y if bias is None else y + local_in_graph(bias).to(y.dtype)
        whole = self._distributed(y, placement)
        if placement != layouts.y:
            whole = whole.redistribute(placements=[layouts.y])
        if bias is not None:  # of a divided y each rank has a part of the bias's gradient, as DTensor knows
            whole = whole + bias
        local: Tensor = whole.to_local() if layouts.is_y_local else whole
        return local


class DTensorColumnParallelLinear(_DTensorLinear):
    """Computes y = x Aᵀ + b with A, a DTensor, split by rows over the group.

    Shapes: x [..., in], or [..., in / R] and such where its layout is divided → y [..., out / R].
    """

    is_column_parallel = True

    @property
    def why_even(self) -> str | None:
        return None if self.layouts.is_y_local else "it returns a DTensor (use_local_output=False)"

    def forward(self, x: Tensor) -> Tensor:
        if not is_dtensor(x) and self.layouts.x.is_replicate() and not is_cast_by_autocast(x):
            y = on_tokens(lambda each: self.column_products(each, self._bias_in_graph()), x)
            return self._written(y, Shard(-1))
        # Others sum dx where they scatter it, or in the dtype that autocast has cast x from.
        x = self._whole(x).to_local(grad_placements=[Partial()])
        return self._written(self.column_products(x, self._bias_in_graph(), sums=False), Shard(-1))

    def _whole(self, x: Any) -> Any:
        """``x`` on every rank, as a DTensor."""
        x = self._distributed(x, self.layouts.x)
        return x if x.placements == (Replicate(),) else x.redistribute(placements=[Replicate()])


class DTensorRowParallelLinear(_DTensorLinear):
    """Computes y = Σ_r x_r A_rᵀ + b with A, a DTensor, split by columns, and x likewise, over the group.

    Shapes: x [..., in / R], or [..., in] where its layout is replicated → y [..., out], or a part of it by its layout.
    """

    is_column_parallel = False

    @property
    def input_is_parallel(self) -> bool:
        """Whether x is this rank's slice, and not a whole one that the layer splits evenly."""
        return self.layouts.x.is_shard(-1)

    def forward(self, x: Tensor) -> Tensor:
        if is_dtensor(x) or not self.input_is_parallel:
            x = self._slice(x)
        return on_tokens(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        sums, is_once = self.layouts.y.is_replicate(), self.layouts.adds_bias_once
        y = self.row_products(x, None if is_once else self._bias_in_graph(), sums=sums)
        return self._written(y, Replicate() if sums else Partial(), self.bias if is_once else None)

    def _slice(self, x: Any) -> Tensor:
        """This rank's part of ``x`` [..., in], whichever part of it there is."""
        x = self._distributed(x, self.layouts.x)
        if x.placements != (Shard(x.dim() - 1),) and x.placements != (Shard(-1),):
            x = x.redistribute(placements=[Shard(-1)])
        local: Tensor = x.to_local()
        return local


def split_over(
    linear: nn.Linear,
    layouts: LinearLayouts,
    parts: Sequence[int],
    home: Sequence[int],
    *,
    is_column: bool,
    source: int | None,
) -> tuple[str, ...]:
    """Make the parameters of a whole ``linear`` DTensors, split over a mesh; collective, unless ``source`` is None.

    Args:
        home: how many units each rank is to have; empty for even shares.

    Returns:
        Methods of these that look at placements, which do not say how units, or parts of different sizes, are divided.
    """
    dim, group = (0 if is_column else 1), require_group(layouts.mesh)
    strided = strided_shard(dim, len(parts)) if len(set(parts)) == 1 and len(parts) > 1 and not home else None
    placements = {"weight": strided or Shard(dim), "bias": (strided or Shard(0)) if is_column else Replicate()}
    refused = OF_CHECKPOINTS if strided is not None else METHODS if home or len(parts) > 1 else ()
    for name, parameter in dict(linear.named_parameters(recurse=False)).items():
        whole, placement = parameter.detach(), placements[name]
        if refused == METHODS and not placement.is_replicate():  # of which torch would give ranks other features
            if source is not None and not whole.is_meta:
                message = whole.to(message_device(group, whole.device), copy=True)
                broadcast(message, source, group)
                whole = message.to(whole.device)
            local = part_of_rank(whole, dim, parts, home or (1,) * group_size(group), group_rank(group))
            layout, shape, stride = [placement], whole.shape, whole.stride()
            divided = DTensor.from_local(local, layouts.mesh, layout, run_check=False, shape=shape, stride=stride)
        else:
            divided = distribute_tensor(whole, layouts.mesh, [placement], src_data_rank=source)
        setattr(linear, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        guard_dtensors([getattr(linear, name)], are_away=False, refused=refused)
    return refused


def become_dtensor_linear(
    linear: nn.Linear, layouts: LinearLayouts, *, is_column: bool, division: Sequence[int] = ()
) -> BalancedLinear:
    """Turn an ``nn.Linear`` with DTensors as parameters into a balanced layer, in place, and return it.

    Args:
        division: as of :class:`BalancedLinear`; of a layer of even shares as torch cuts what ranks do not divide.
    """
    layer: Any = linear
    layer.__class__ = DTensorColumnParallelLinear if is_column else DTensorRowParallelLinear
    layer.layouts, layer.process_group = layouts, require_group(layouts.mesh)
    size = layer.out_features if is_column else layer.in_features
    ranks = group_size(layer.process_group)
    if not division and size % ranks:
        most = -(-size // ranks)
        division = [max(min(most, size - rank * most), 0) for rank in range(ranks)]
    layer.parts, layer.division = (size,), tuple(division)
    layer.prepare_balancing()
    balanced: BalancedLinear = layer
    return balanced
