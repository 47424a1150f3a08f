"""Column- and row-parallel linear layers whose products follow a plan.

``K`` input and ``N`` output features on this rank, ``R`` ranks:

========================  ==============  ===============  =====================  ====================
layer                     weight          input            forward collective     backward collective
========================  ==============  ===============  =====================  ====================
``ColumnParallelLinear``  [out/R, in]     replicated       none (or all-gather)   all-reduce of dx
``RowParallelLinear``     [out, in/R]     split (or full)  all-reduce of y        none (or all-gather)
========================  ==============  ===============  =====================  ====================
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import (
    gather_along,
    group_rank,
    group_ranks,
    group_size,
    require_group,
    scatter_along,
)
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import on_tokens
from zeroresize.layers.splitting import Parts, checked_parts, keep_ties, part_of_rank, why_no_plain_linear
from zeroresize.plan.ownership import home_counts
from zeroresize.utils.checked import checked, integer

_LayerT = TypeVar("_LayerT", bound="ParallelLinear")


class ParallelLinear(BalancedLinear, nn.Module):
    """Holds what both kinds have in common: they are divided along dimension 0 or 1 of the weight."""

    in_features: int
    out_features: int
    bias: Any

    def _make(
        self,
        process_group: ProcessGroup | DeviceMesh,
        bias: bool,
        own_features: int | None,
        parts: Parts | None,
        unit_size: int | None,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        why_whole: str | None,
    ) -> None:
        """Make the parameters."""
        self.process_group = require_group(process_group)
        num_ranks, name = group_size(self.process_group), self._divided
        size, kind = getattr(self, name), type(self).__name__
        num_units, given = num_ranks, 1 if parts is None else parts
        if own_features is None:
            num_units = num_units_to_divide(self, name, given, unit_size, self.process_group, kind)
        self.division = home_counts(num_units, num_ranks) if num_units % num_ranks else ()
        if self.division or parts is not None:
            self.parts = checked_parts(given, size, num_units, kind, "units" if unit_size else "ranks")
        if why_whole and (self.division or len(self.parts or ()) > 1):
            raise ValueError(f"{kind}: parts={parts!r}, unit_size={unit_size} is not allowed with {why_whole}")
        rank = group_rank(self.process_group)
        here = size * self.home[rank] // sum(self.home) if own_features is None else own_features
        is_meta = device is not None and torch.device(device).type == "meta"
        is_right = is_meta and not why_whole and unit_size is None and 0 <= (own_features or 0) <= size
        if own_features is not None and not is_right:
            raise ValueError(
                f"own_features={own_features} of {name}={size} is not allowed: it must be from 0 to {size}, on "
                "device='meta', without unit_size=, and not of a layer that gathers its output or splits its input "
                "evenly itself"
            )
        shape = (here, self.in_features) if self.is_column_parallel else (self.out_features, here)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.prepare_balancing()
        self.reset_parameters()

    @property
    def _divided(self) -> str:
        return "out_features" if self.is_column_parallel else "in_features"

    def reset_parameters(self) -> None:
        """Draw the whole layer as ``torch.nn.Linear`` does and keep this rank's slice; a row-parallel bias is zero.

        Seeded alike, the ranks together hold what one rank would.
        """
        if self.weight.device.type == "meta":
            return
        is_drawn = self.is_column_parallel and self.bias is not None
        whole = nn.Linear(
            self.in_features, self.out_features, is_drawn, device=self.weight.device, dtype=self.weight.dtype
        )
        self._take_slice_of(whole)
        if self.bias is not None and not is_drawn:
            nn.init.zeros_(self.bias)

    @classmethod
    def _from_linear(
        cls: type[_LayerT], linear: nn.Linear, process_group: ProcessGroup | DeviceMesh, **options: Any
    ) -> _LayerT:
        if isinstance(linear, BalancedLinear) or not isinstance(linear, nn.Linear):
            split = ", which is split already" if isinstance(linear, BalancedLinear) else ""
            raise ValueError(f"from_linear needs a whole torch.nn.Linear, found a {type(linear).__name__}{split}")
        if (why := why_no_plain_linear(linear)) is not None:
            raise ValueError(f"from_linear needs a whole torch.nn.Linear, found {why}")
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            process_group=process_group,
            device="meta",
            **options,
        )
        layer._take_slice_of(linear)
        division = layer.is_column_parallel, layer.division, layer.parts or (), *group_ranks(layer.process_group)
        keep_ties(linear, dict(linear.named_parameters(recurse=False)), layer, division)
        return layer.train(linear.training)

    def _take_slice_of(self, linear: nn.Linear) -> None:
        parts, dim = self.parts or (getattr(self, self._divided),), self.divided_dim
        where = self.home, group_rank(self.process_group), self.begins
        for name, whole in linear.named_parameters(recurse=False):
            is_divided = name == "weight" or self.is_column_parallel
            value = part_of_rank(whole, dim, parts, *where) if is_divided else whole.detach().clone()
            setattr(self, name, nn.Parameter(value, requires_grad=whole.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        return on_tokens(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"ranks={group_size(self.process_group)}, bias={self.bias is not None}"
        )


@checked(in_features=integer(1), out_features=integer(1), own_features=integer(0), unit_size=integer(1))
class ColumnParallelLinear(ParallelLinear):
    """Computes y = x Aᵀ + b with A split by rows (output features) over the group.

    Args:
        in_features: size of the replicated input's last dimension.
        out_features: size of the whole output's last dimension; must divide by the number of ranks, or
            by ``unit_size``.
        process_group: the tensor-parallel group, or a one-dimensional ``DeviceMesh`` of it; None is an error.
        bias: whether to learn b, split like the output.
        gather_output: return the whole output on every rank instead of this rank's slice. Such a layer is left alone
            by balancing.
        own_features: how many of the output features this rank has, for uneven shares; only on the meta device, as
            which ones they are is the caller's matter. None for an even share.
        parts: of a packed layer, such as q, k and v in one: how many equal parts its output features are, or how many
            features each has in the undivided layer. Each is split by itself, and a rank returns its share of every
            part, one after the other. None for one part, or for weights that the caller has split in another way.
        unit_size: how many features are one unit, such as a head: ranks hold whole units, the first ones one more where
            their number does not divide them. Of parts of different sizes it is the unit of the smallest one. None for
            equally many features on every rank.
        device, dtype: of the parameters.

    Shapes: x [..., in] → y [..., out / R], or [..., out] with ``gather_output``.

    Raises:
        ValueError: for features that do not divide, or a missing group.
    """

    is_column_parallel = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        process_group: ProcessGroup | DeviceMesh,
        bias: bool = True,
        gather_output: bool = False,
        own_features: int | None = None,
        parts: Parts | None = None,
        unit_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        why_whole = "gather_output=True" if gather_output else None
        self._make(process_group, bias, own_features, parts, unit_size, device, dtype, why_whole)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        process_group: ProcessGroup | DeviceMesh,
        gather_output: bool = False,
        parts: Parts = 1,
        unit_size: int | None = None,
    ) -> ColumnParallelLinear:
        """Make the layer of this rank's slice of a full ``linear`` that every rank holds alike.

        Where it is packed, such as q, k and v in one, say so by ``parts``.

        Raises:
            ValueError: for features or parts that do not divide by the number of ranks, a missing group, or what is no
                ``nn.Linear`` or split already.
        """
        return cls._from_linear(linear, process_group, gather_output=gather_output, parts=parts, unit_size=unit_size)

    def _forward(self, x: Tensor) -> Tensor:
        y = self.column_products(x, self.bias)
        return gather_along(y, self.process_group, -1) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"


@checked(in_features=integer(1), out_features=integer(1), own_features=integer(0), unit_size=integer(1))
class RowParallelLinear(ParallelLinear):
    """Computes y = x Aᵀ + b, A split by columns (input features) over the group; b is replicated and added once.

    Args:
        in_features: size of the whole input's last dimension; must divide by the number of ranks, or
            by ``unit_size``.
        out_features: size of the output's last dimension.
        process_group: the tensor-parallel group, or a one-dimensional ``DeviceMesh`` of it; None is an error.
        bias: whether to learn b.
        input_is_parallel: the input is this rank's slice [..., in / R]; otherwise the whole [..., in] is taken
            and split.
        own_features: how many of the input features this rank has; as of :class:`ColumnParallelLinear`.
        parts: of a layer that reads the shares of several parts, one after the other: how many equal parts its input
            features are, or the features of each; as of :class:`ColumnParallelLinear`.
        unit_size: how many of the input features are one unit; as of :class:`ColumnParallelLinear`.
        device, dtype: of the parameters.

    Shapes: x [..., in / R] (or [..., in]) → y [..., out], the same on every rank.

    Raises:
        ValueError: for features that do not divide, or a missing group.
    """

    is_column_parallel = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        process_group: ProcessGroup | DeviceMesh,
        bias: bool = True,
        input_is_parallel: bool = True,
        own_features: int | None = None,
        parts: Parts | None = None,
        unit_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.input_is_parallel = in_features, out_features, input_is_parallel
        why_whole = None if input_is_parallel else "input_is_parallel=False"
        self._make(process_group, bias, own_features, parts, unit_size, device, dtype, why_whole)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        process_group: ProcessGroup | DeviceMesh,
        input_is_parallel: bool = True,
        parts: Parts = 1,
        unit_size: int | None = None,
    ) -> RowParallelLinear:
        """Make the layer of this rank's slice of a full ``linear``; see :meth:`ColumnParallelLinear.from_linear`."""
        return cls._from_linear(
            linear, process_group, input_is_parallel=input_is_parallel, parts=parts, unit_size=unit_size
        )

    def _forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_along(x, self.process_group, -1)
        y = self.row_products(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, input_is_parallel={self.input_is_parallel}"


def num_units_to_divide(
    linear: Any, features: str, parts: Parts, unit_size: int | None, process_group: ProcessGroup, whose: str
) -> int:
    """Return how many units of a layer, or of its smallest part, ranks divide; without units, the number of ranks.

    It is checked before anything is made.
    """
    size, num_ranks = getattr(linear, features), group_size(process_group)
    if unit_size is not None:
        least = size // max(parts, 1) if isinstance(parts, int) else min(parts, default=size)
        num_units, left = divmod(least, unit_size)
        if left or num_units < num_ranks:
            raise ValueError(
                f"{whose}: unit_size={unit_size} makes {least / unit_size:g} units of {least} features: allowed are "
                f"sizes that divide them, and leave each of the {num_ranks} ranks one unit at least"
            )
        return num_units
    if size % num_ranks:
        raise ValueError(
            f"{whose}: {features}={size} is not divisible by the {num_ranks} ranks of the process group, in a layer "
            f"with in_features={linear.in_features} and out_features={linear.out_features}. The next larger {features} "
            f"that is divisible is {(size // num_ranks + 1) * num_ranks}. With unit_size=, such as the size of a head, "
            "ranks hold whole units, the first ones one more"
        )
    return num_ranks
