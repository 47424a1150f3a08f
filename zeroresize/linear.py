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

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.collectives import gather_from, group_rank, group_size, require_group, scatter_to
from zeroresize.functional import LastGradients, column_parallel_products, row_parallel_products
from zeroresize.migration.layer_loans import LayerLoans
from zeroresize.plan import LayerPlan
from zeroresize.probe import Probes


class BalancedLinear:
    """What a parallel linear layer needs to be balanced; mixed into a ``torch.nn.Module``.

    Attributes:
        plan: the layer's current :class:`~zeroresize.plan.LayerPlan`, None for the whole product. Evaluation
            (``training`` False, with gradients or without) always computes in full.
        loans: what other ranks compute of the layer, and it for them; None where nothing migrates.
        probes: what measures or slows the products.
        last: gradients of the previous backward, held only for ``imputation="same"``.
        num_tokens: T, summed over the training forwards since :meth:`forget_forwards`.
        num_forwards: how many they were, recomputations included.
        compute_dtype: of the last training forward's products.
        watch_input: called with every training forward's local input x [..., K]; None for nobody.
        is_converted: whether ``zeroresize.convert`` has taken the layer in.
        is_column_parallel: whether x is replicated and dx summed over the group, instead of x split and y summed.
        process_group: the tensor-parallel group.
    """

    is_column_parallel: ClassVar[bool]
    plan: LayerPlan | None
    loans: LayerLoans | None
    probes: Probes
    last: LastGradients | None
    num_tokens: int
    num_forwards: int
    compute_dtype: torch.dtype
    watch_input: Callable[[Tensor], None] | None
    is_converted: bool
    process_group: ProcessGroup
    weight: Tensor
    training: bool

    def prepare_balancing(self) -> None:
        """Give the layer its balancing state: no plan, no probes."""
        self.plan = None
        self.loans = None
        self.probes = Probes()
        self.last = None
        self.forget_forwards()
        self.compute_dtype = self.weight.dtype
        self.watch_input = None
        self.is_converted = False

    def forget_forwards(self) -> None:
        """Count training forwards anew."""
        self.num_tokens = self.num_forwards = 0

    @property
    def num_columns(self) -> int:
        """K, the columns a plan chooses from."""
        return self.weight.shape[1]

    def column_products(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y [..., N] of the whole x [..., K]; in backward dx is summed over the group."""
        if self.training and self.loans is not None:
            return self._column_products_with_loans(x, bias, self.loans)
        return self._column_products(x, bias, None)

    def row_products(self, x: Tensor) -> Tensor:
        """Sum over the group of y [..., N] of each rank's slice x [..., K]."""
        if self.training and self.loans is not None:
            return self._row_products_with_loans(x, self.loans)
        return self._row_products(x, None)

    def _column_products(self, x: Tensor, bias: Tensor | None, loans: LayerLoans | None) -> Tensor:
        x, weight, bias = _cast_for_autocast(x, self._weight_in_force(loans), bias)
        plan = self._plan_in_force(x)
        return column_parallel_products(x, weight, bias, plan, self.process_group, self._probes_told, self.last, loans)

    def _row_products(self, x: Tensor, loans: LayerLoans | None) -> Tensor:
        x, weight, _ = _cast_for_autocast(x, self._weight_in_force(loans), None)
        plan = self._plan_in_force(x)
        return row_parallel_products(x, weight, plan, self.process_group, self._probes_told, self.last, loans)

    # A compiled graph cannot tell whether a weight is still the one that was lent.
    _column_products_with_loans = torch.compiler.disable(_column_products)
    _row_products_with_loans = torch.compiler.disable(_row_products)

    @property
    def _probes_told(self) -> Probes:
        return self.probes if self.training else self.probes.of_evaluation()

    def _weight_in_force(self, loans: LayerLoans | None) -> Tensor:
        return self.weight if loans is None else loans.weight_in_force(self.weight)

    def _plan_in_force(self, x: Tensor) -> LayerPlan | None:
        if x.shape[-1] != self.num_columns:
            raise ValueError(
                f"input {tuple(x.shape)} does not fit weight {tuple(self.weight.shape)}: "
                f"its last dimension must be {self.num_columns}"
            )
        if not self.training:
            return None
        self.num_tokens += x.numel() // self.num_columns
        self.num_forwards += 1
        self.compute_dtype = x.dtype
        if self.watch_input is not None:
            self.watch_input(x)
        return self.plan


class ColumnParallelLinear(BalancedLinear, nn.Module):
    """y = x Aᵀ + b with A split by rows (output features) over the group.

    Args:
        in_features: size of the replicated input's last dimension.
        out_features: size of the whole output's last dimension; must divide by the number of ranks.
        process_group: the tensor-parallel group; None is an error.
        bias: whether to learn b, split like the output.
        gather_output: return the whole output on every rank instead of this rank's slice. Such a layer is left alone
            by balancing.
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
        process_group: ProcessGroup,
        bias: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.process_group = require_group(process_group)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        num_rows = _divide("out_features", out_features, group_size(process_group))
        self.weight = nn.Parameter(torch.empty(num_rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_rows, device=device, dtype=dtype)) if bias else None
        self.prepare_balancing()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole layer as ``torch.nn.Linear`` does and keep this rank's slice.

        Seeded alike, the ranks together hold what one rank would.
        """
        if self.weight.device.type == "meta":
            return
        whole = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self._take_slice_of(whole)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, process_group: ProcessGroup, gather_output: bool = False
    ) -> ColumnParallelLinear:
        """This rank's slice of a full ``linear`` that every rank holds alike.

        Raises:
            ValueError: for features that do not divide by the number of ranks, or a missing group.
        """
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            process_group=process_group,
            gather_output=gather_output,
            device="meta",
        )
        layer._take_slice_of(linear)
        return layer.train(linear.training)

    def _take_slice_of(self, linear: nn.Linear) -> None:
        ranks, rank = group_size(self.process_group), group_rank(self.process_group)
        self.weight = _slice_of(linear.weight, 0, ranks, rank)
        if linear.bias is not None:
            self.bias = _slice_of(linear.bias, 0, ranks, rank)

    def forward(self, x: Tensor) -> Tensor:
        y = self.column_products(x, self.bias)
        return gather_from(y, self.process_group) if self.gather_output else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"ranks={group_size(self.process_group)}, bias={self.bias is not None}, gather_output={self.gather_output}"
        )


class RowParallelLinear(BalancedLinear, nn.Module):
    """y = x Aᵀ + b with A split by columns (input features) over the group; b is replicated and added once.

    Args:
        in_features: size of the whole input's last dimension; must divide by the number of ranks.
        out_features: size of the output's last dimension.
        process_group: the tensor-parallel group; None is an error.
        bias: whether to learn b.
        input_is_parallel: the input is this rank's slice [..., in / R]; otherwise the whole [..., in] is taken
            and split.
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
        process_group: ProcessGroup,
        bias: bool = True,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.process_group = require_group(process_group)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        num_columns = _divide("in_features", in_features, group_size(process_group))
        self.weight = nn.Parameter(torch.empty(out_features, num_columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.prepare_balancing()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole weight as ``torch.nn.Linear`` does and keep this rank's slice; the bias is zero.

        Seeded alike, the ranks together hold what one rank would.
        """
        if self.weight.device.type == "meta":
            return
        device, dtype = self.weight.device, self.weight.dtype
        whole = nn.Linear(self.in_features, self.out_features, bias=False, device=device, dtype=dtype)
        ranks, rank = group_size(self.process_group), group_rank(self.process_group)
        self.weight = _slice_of(whole.weight, 1, ranks, rank)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, process_group: ProcessGroup, input_is_parallel: bool = True
    ) -> RowParallelLinear:
        """This rank's slice of a full ``linear`` that every rank holds alike.

        Raises:
            ValueError: for features that do not divide by the number of ranks, or a missing group.
        """
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            process_group=process_group,
            input_is_parallel=input_is_parallel,
            device="meta",
        )
        layer.weight = _slice_of(linear.weight, 1, group_size(process_group), group_rank(process_group))
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to(x, self.process_group)
        y = self.row_products(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"ranks={group_size(self.process_group)}, bias={self.bias is not None}, "
            f"input_is_parallel={self.input_is_parallel}"
        )


def _cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What ``torch.autocast`` does to the operands of ``F.linear``; gradients are cast back by autograd."""
    dtype = _autocast_dtype(x.device.type)
    if dtype is None:
        return x, weight, bias
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in on ``device_type``, or None where it is off (any torch from 2.2 on)."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def _divide(name: str, size: int, num_ranks: int) -> int:
    if size % num_ranks:
        raise ValueError(f"{name}={size} does not divide by the {num_ranks} ranks of the process group")
    return size // num_ranks


def _slice_of(parameter: Tensor, dim: int, num_ranks: int, rank: int) -> nn.Parameter:
    own = parameter.detach().chunk(num_ranks, dim=dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)
