"""What a parallel linear layer needs to be balanced: its plan, its loans, its probes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import gather_along, group_rank, group_size, scatter_along
from zeroresize.kernels.probe import Probes
from zeroresize.layers.compiled_products import CompiledForwards, compiled_products
from zeroresize.layers.divided_heads import whole_heads, with_divided_heads
from zeroresize.layers.functional import (
    LastGradients,
    ProductContext,
    SharedProducts,
    column_parallel_products,
    row_parallel_products,
)
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.segment_draws import follow_draws
from zeroresize.layers.shared_rows import SharedRows
from zeroresize.layers.weight_checks import tell_shards_of
from zeroresize.plan.layer import LayerPlan
from zeroresize.utils.torch_private import current_backward, is_tensor_of_tensors
from zeroresize.utils.torch_state import autocast_dtype

#: Attributes that a balancer, or an injector of slowness, fills.
OF_A_BALANCER = frozenset(
    {"plan", "loans", "probes", "last", "needs_eager_autograd", "segment", "forwards"}
    | {"watch_start", "watch_forward", "watch_input"}
)


def cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands as ``torch.autocast`` casts those of ``F.linear``; autograd casts gradients back."""
    dtype = autocast_dtype(x.device.type)
    if dtype is None:
        return x, weight, bias
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def is_cast_by_autocast(x: Tensor) -> bool:
    """Tell whether a layer computes with another dtype than that of its input, since autocast is on."""
    dtype = autocast_dtype(x.device.type)
    return dtype is not None and x.dtype not in (dtype, torch.float64) and not x.is_nested


def is_being_captured(x: Tensor) -> bool:
    """Return whether what computes with ``x`` now is captured in a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class BalancedLinear:
    """Holds what a parallel linear layer needs to be balanced; mixed into a ``torch.nn.Module``.

    Attributes:
        plan: the layer's current :class:`~zeroresize.plan.layer.LayerPlan`, None for the whole product. Evaluation
            (``training`` False, with gradients or without) always computes in full.
        loans: products that other ranks compute for the layer, and it for them; None where nothing migrates.
        probes: what measures or slows the products.
        last: gradients of the previous backward, held only for ``paper.imputation="same"``.
        num_tokens: T, summed over the training forwards since :meth:`forget_forwards`.
        num_forwards: number of these forwards, recomputations included.
        num_recomputations: number of them that activation checkpointing made, within a backward.
        compute_dtype: of the last training forward's products.
        watch_forward: called with T and ``training`` before a forward sends anything to other ranks; may be None.
        watch_start: called with a training forward's local input x [..., K] before it sends anything to other ranks;
            may be None.
        needs_eager_autograd: whether columns may migrate, now or later.
        watch_input: called with every training forward's local input x [..., K]; may be None.
        is_compiled: whether ``torch.compile`` compiled a training forward; the activations of a graph are not counted.
        forwards: what a compiled graph finds of the layer.
        name_in_model: the layer's name, for errors; empty before ``zeroresize.convert`` or a balancer has told it.
        is_converted: whether the layer may be balanced: ``zeroresize.convert`` or ``parallelize_module`` took it.
        stays_even: why the layer is in no segment, so that its units stay evenly divided. None for a layer of a
            segment, and before ``convert``, or a balancer, has looked for segments.
        even_shape: [N, K] of :attr:`local_weight` as the host made it, whatever this rank owns now; where ranks do not
            divide the units, as on the ranks with one more. Alike on all ranks.
        division: how many units each rank has from the host where these are not equally many; else ().
        begins: the first unit of each rank where several ranks hold some at home; else ().
        block: how many units of other layers each of them belongs to, then.
        segment: in which it lies, if its units may change hands; ``zeroresize.convert`` or a balancer finds it. A copy
            of such a layer has none.
        is_column_parallel: whether x is replicated and dx summed over the group, instead of x split and y summed.
        moves_only: whether its forward is its host's own, so that nothing of it is lent or dropped.
        is_segment: whether x is replicated and y summed, so that it is a segment by itself.
        process_group: the tensor-parallel group.
        weight: the host's parameter; what this rank multiplies by is :attr:`local_weight`.
        is_captured: whether a forward was captured in a CUDA graph, which reads the weight where it lay then.
        family: the layer, its deep copies and theirs, as long as something holds them; None before the first one.
        is_copy_of_uneven: whether it is a copy of a layer whose units were away, on this rank or another.
        has_dtensors: whether its parameters are DTensors over its group, of which :attr:`local_weight` is a local part.
        shared_rows: which rows of the weight, of a row-parallel layer columns, several ranks hold; None for none.
        num_sequences: of the last training forward's x [B, S, K]; 1 where that has other dimensions.
        parts: how the undivided layer's output features, or of a row-parallel layer its input features, were cut before
            the split: the features of each part, of which every rank has its share. A single part was split
            contiguously; None where the weights are somebody else's, who may have split them in any way.
        refused_at_home: methods of its DTensors that look at placements, which tell too little of this packed layer.
        weight_is_transposed: whether ``weight`` is [K, N] and :attr:`local_weight` a view of it.
        extra: of a row-parallel layer, which parameters besides those of layers belong to its segment's units: owner,
            attribute, dimension of the units, and its size in the undivided model. Copies of a model know their own.
    """

    is_column_parallel: ClassVar[bool]
    moves_only: ClassVar[bool] = False
    is_segment: ClassVar[bool] = False
    weight_is_transposed: ClassVar[bool] = False
    has_dtensors: ClassVar[bool] = False
    family: WeakSet[BalancedLinear] | None = None
    is_copy_of_uneven: bool = False
    parts: tuple[int, ...] | None = None
    division: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    block: int = 1
    shared_rows: SharedRows | None = None
    extra: tuple[tuple[Any, str, int, int], ...] = ()
    num_sequences: int = 1
    refused_at_home: tuple[str, ...] = ()
    plan: LayerPlan | None
    loans: SharedProducts | None
    probes: Probes
    last: LastGradients | None
    num_tokens: int
    num_forwards: int
    num_recomputations: int
    compute_dtype: torch.dtype
    watch_forward: Callable[[int, bool], None] | None
    watch_start: Callable[[Tensor], None] | None
    needs_eager_autograd: bool
    watch_input: Callable[[Tensor], None] | None
    is_compiled: bool
    is_captured: bool
    forwards: CompiledForwards
    name_in_model: str
    is_converted: bool
    stays_even: str | None
    even_shape: torch.Size
    segment: OwnedSegment | None
    process_group: ProcessGroup
    weight: Tensor
    training: bool

    def prepare_balancing(self) -> None:
        """Give the layer its balancing state: no plan, no probes."""
        self._prepare_for_a_balancer()
        self.compute_dtype, self.even_shape = self.local_weight.dtype, self._even_shape()
        self.is_converted = self.is_compiled = False
        self.stays_even = None
        self.name_in_model = ""

    def _even_shape(self) -> torch.Size:
        if not self.division:
            return self.local_weight.shape
        sizes = list(self.local_weight.shape)
        sizes[self.divided_dim] = sum(self.parts or ()) * self.home[0] // self.num_units_at_home
        return torch.Size(sizes)

    @property
    def divided_dim(self) -> int:
        """The dimension of :attr:`local_weight` that the ranks have divided."""
        return 0 if self.is_column_parallel else 1

    @property
    def unit_dims(self) -> Mapping[str, int]:
        """Which dimension of each of its tensors the ranks have divided; of others all ranks hold the same."""
        of_weight = {"weight": self.divided_dim ^ self.weight_is_transposed}
        return of_weight | {"bias": 0} if self.is_column_parallel else of_weight

    @property
    def whole_sizes(self) -> set[int]:
        """The sizes of its tensors that all ranks have."""
        return {self.even_shape[self.is_column_parallel]}

    @property
    def home(self) -> tuple[int, ...]:
        """How many units each rank has from the host; 1 each where their shares are even."""
        return self.division or (1,) * group_size(self.process_group)

    @property
    def num_units_at_home(self) -> int:
        """How many units there are of :attr:`home`, each counted once."""
        return self.begins[-1] + self.home[-1] if self.begins else sum(self.home)

    def divide_by(self, home: Sequence[int], begins: Sequence[int] = (), block: int = 1) -> None:
        """Note that each rank holds so many whole units from now on, and which is its first where ranks share some.

        Args:
            block: how many units of the segment share one of these.
        """
        self.division, self.begins, self.block = tuple(home), tuple(begins), block
        self.even_shape = self._even_shape()

    @property
    def whole_size(self) -> int:
        """The undivided layer's features that the ranks have divided."""
        return self.even_shape[self.divided_dim] * self.num_units_at_home // self.home[0]

    @property
    def even_part(self) -> float:
        """What an even share is of the work of :attr:`even_shape`: 1 where the ranks divide the units."""
        return self.num_units_at_home / (len(self.home) * self.home[0])

    @property
    def home_shape(self) -> torch.Size:
        """[N, K] of :attr:`local_weight` as the host made it on this rank."""
        return self.home_shape_on(group_rank(self.process_group))

    def home_shape_on(self, rank: int) -> torch.Size:
        """Return :attr:`home_shape` of a rank of the group."""
        sizes = list(self.even_shape)
        sizes[self.divided_dim] = sizes[self.divided_dim] * self.home[rank] // self.home[0]
        return torch.Size(sizes)

    @property
    def is_home(self) -> bool:
        """Whether it holds what its host gave it; a copy has no segment, but the shape of when it was made."""
        if self.segment is not None:
            return self.segment.owned.is_home
        return self.local_weight.shape == self.home_shape and not self.is_copy_of_uneven

    def require_home(self, call: str) -> None:
        """Raise RuntimeError for a call that takes what this rank holds for what its host gave it, if it is not."""
        if not self.is_home:
            raise RuntimeError(
                f"{call} {self.name_in_model}, whose units are away: have them at home, `with balancer.at_home(): ...` "
                "on every rank of the group"
            )

    def _prepare_for_a_balancer(self) -> None:
        self.plan = self.loans = self.last = self.segment = None
        self.watch_start = self.watch_forward = self.watch_input = None
        self.probes, self.forwards = Probes(), CompiledForwards(self)
        self.needs_eager_autograd = self.is_captured = False
        self.forget_forwards()
        tell_shards_of(self)

    def __copy__(self) -> BalancedLinear:
        return self._filled(type(self).__new__(type(self)), self._own_state())

    def __deepcopy__(self, memo: dict[int, Any]) -> BalancedLinear:
        """A layer of the same process group, converted if this one is, without what its balancer put there."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = other = type(self).__new__(type(self))  # before hooks are copied, which know their module
        self.family = family = self.family or WeakSet([self])
        memo[id(family)] = family
        self._filled(other, copy.deepcopy(self._own_state(), memo))
        family.add(other)
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, since it belongs to a process group: save model.state_dict() "
            "instead of the model, and load that into a model that is built and converted in the same way"
        )

    def _own_state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in OF_A_BALANCER}

    def _filled(self, other: BalancedLinear, state: dict[str, Any]) -> BalancedLinear:
        vars(other).update(state)
        other._prepare_for_a_balancer()
        if self.segment is not None:
            other.is_copy_of_uneven = not self.segment.owned.is_home
            other.stays_even = "it is a copy of a layer whose segment was known"
        return other

    @property
    def is_searched(self) -> bool:
        """Whether segments were looked for with this layer among the converted ones."""
        return self.segment is not None or self.stays_even is not None

    def forget_forwards(self) -> None:
        """Restart the counts of training forwards."""
        # Numbers need no registering, which takes a module ten times as long, in every layer at every step.
        vars(self).update(num_tokens=0, num_forwards=0, num_recomputations=0)

    @property
    def local_weight(self) -> Tensor:
        """[N, K]: this rank's own part of the layer, of which its products are made.

        Plans, loans, optimizer state and statistics refer to its columns. It is :attr:`weight` unless a subclass keeps
        its parameter in another form; one whose columns may be lent or frozen must give the same tensor every time.
        """
        return self.weight

    def weight_in_graph(self) -> Tensor:
        """Return :attr:`local_weight` such that its gradient reaches :attr:`weight`."""
        return self._summed(self._local_in_graph())[0]

    def _local_in_graph(self) -> Tensor:
        return self.local_weight

    def _summed(self, *parameters: Tensor | None) -> tuple[Any, ...]:
        """Return parameters whose gradients are summed where several ranks hold rows; in graphs, operators do so."""
        if self.shared_rows is None or torch.compiler.is_compiling():
            return parameters
        return self.shared_rows.in_graph(parameters, self.process_group, self.name_in_model)

    @property
    def may_lend(self) -> bool:
        """Whether other ranks may compute some of its columns: only if it multiplies by its parameter itself, of which
        this rank holds all of its part between two steps.
        """
        return self.local_weight is local_of(self.weight) and not self.is_sharded_further(self.weight)

    def is_sharded_further(self, parameter: Tensor) -> bool:
        """Tell whether this rank holds only a shard of its part of ``parameter`` between forwards, as ``fully_shard``
        makes it.
        """
        return is_tensor_of_tensors(parameter)

    @property
    def why_even(self) -> str | None:
        """Why the layer's units must stay evenly divided, as it handles them itself; None where they need not."""
        return None

    @property
    def num_columns(self) -> int:
        """K, the columns a plan chooses from."""
        return self.local_weight.shape[1]

    def column_products(
        self, x: Tensor, bias: Tensor | None, *, sums: bool = True, sequence_dim: int | None = None
    ) -> Tensor:
        """Compute y [..., N] of the whole x [..., K]; in backward dx is summed over the group.

        Args:
            sums: False where the caller sums this rank's part of dx.
            sequence_dim: where ranks divide a sequence (sequence parallelism), the dimension of x along which each has
                an equal slice: x is gathered, and the sum of dx scattered, also while columns are lent.
        """
        if sequence_dim is not None:
            sums = False
            x = gather_along(x, self.process_group, sequence_dim, sums=True)
        if torch.compiler.is_compiling():
            y = self._products_in_graph("column", x, bias, sums)
        else:
            y = self._products_now(column_parallel_products, x, bias, sums)
        if self.shared_rows is None:
            return y
        y = self.shared_rows.repeated(y)
        is_eager = self._shared_in_force is not None and not torch.compiler.is_compiling()
        return with_divided_heads(y, self.shared_rows, x) if is_eager else y

    def row_products(
        self, x: Tensor, bias: Tensor | None = None, *, sums: bool = True, sequence_dim: int | None = None
    ) -> Tensor:
        """Compute the sum over the group of y [..., N] of each rank's slice x [..., K].

        Args:
            bias: [N], is added to the sum, in equal parts by the ranks; None for nothing.
            sums: False where the caller sums this rank's part of y.
            sequence_dim: where ranks divide a sequence, the dimension along which each gets an equal slice of the sum.

        Raises:
            ValueError: if the ranks do not divide the sequence.
        """
        if sequence_dim is not None:
            y = self.row_products(x, bias, sums=False)
            return scatter_along(y, self.process_group, sequence_dim, sums=True)
        if torch.compiler.is_compiling():
            return self._products_in_graph("row", x, bias, sums)
        return self._products_now(row_parallel_products, x, bias, sums)

    def _products_now(self, compute: Callable[..., Tensor], x: Tensor, bias: Tensor | None, sums: bool) -> Tensor:
        x = whole_heads(x)
        loans = self._forward_begins(x, self.training)
        if loans is not None:
            weight = loans.weight_in_force(self.local_weight)
            (bias,) = self._summed(bias) if self.is_column_parallel else (bias,)
        elif self.is_column_parallel:
            weight, bias = self._summed(self._local_in_graph(), bias)
        else:
            weight = self.weight_in_graph()
        x, weight, bias = cast_for_autocast(x, weight, bias)
        return compute(x, weight, bias, self.context_of(self._plan_in_force(x), loans, self.training, sums))

    @property
    def _shared_in_force(self) -> SharedRows | None:
        """What to heed of :attr:`shared_rows`: where no gradient is computed, caches may keep keys of all tokens."""
        is_all = self.is_column_parallel and not (self.training and torch.is_grad_enabled())
        return None if is_all else self.shared_rows

    def _products_in_graph(self, kind: str, x: Tensor, bias: Tensor | None, sums: bool) -> Tensor:
        x, weight, bias = cast_for_autocast(x, self.weight_in_graph(), bias)
        return compiled_products(kind, x, weight, bias, self.forwards.number, self.training, sums)

    def _forward_begins(self, x: Tensor, is_training: bool) -> SharedProducts | None:
        """Tell who watches before anything is sent, and return the loans of this forward."""
        if is_being_captured(x):
            self.is_captured = True
        elif self.segment is not None and self.segment.may_draw and not self.is_segment:
            follow_draws(self.segment, is_column_parallel=self.is_column_parallel, device=x.device)
        loans = self.loans if is_training else None
        sends = loans is not None or not self.is_column_parallel
        if self.watch_forward is not None and sends:
            self.watch_forward(math.prod(x.shape[:-1]), self.training)
        return loans

    def compiled_forward_begins(self, x: Tensor, is_training: bool, sums: bool) -> ProductContext:
        """Count and watch a forward that a compiled graph runs, and return how it is computed.

        Raises:
            RuntimeError: if columns of the weight are lent, and it has changed since.
        """
        self.is_compiled = True
        loans = self._forward_begins(x, is_training)
        if loans is not None:
            loans.forward_begins(self.local_weight)
            loans = loans if loans.has_loans else None
        return self.context_of(self._plan_in_force(x), loans, is_training, sums)

    def context_of(
        self, plan: LayerPlan | None, loans: SharedProducts | None, is_training: bool, sums: bool
    ) -> ProductContext:
        """Return how a product by ``plan`` and ``loans`` is computed."""
        probes = self.probes if is_training else self.probes.of_evaluation()
        group, eagerly, shared = self.process_group, self.needs_eager_autograd, self._shared_in_force
        return ProductContext(plan, group, probes, self.last, loans, eagerly, sums, shared)

    def _plan_in_force(self, x: Tensor) -> LayerPlan | None:
        if x.shape[-1] != self.num_columns:
            layer = f"layer {self.name_in_model}: " if self.name_in_model else ""
            split = " not split, or row-parallel" if self.is_column_parallel else " column-parallel"
            raise ValueError(
                f"{layer}input {tuple(x.shape)} does not fit weight {tuple(self.local_weight.shape)}: "
                f"its last dimension must be {self.num_columns}. Is the layer before it{split}?"
            )
        if not self.training:
            return None
        self._count(x)
        return self.plan

    def _count(self, x: Tensor) -> None:
        """Count a training forward on x, and tell who watches."""
        if self.watch_start is not None:
            self.watch_start(x)
        vars(self).update(
            num_tokens=self.num_tokens + math.prod(x.shape[:-1]),
            num_forwards=self.num_forwards + 1,
            num_sequences=x.shape[0] if x.ndim == 3 else 1,
            num_recomputations=self.num_recomputations + (current_backward() != -1),
            compute_dtype=x.dtype,
        )
        if self.watch_input is not None:
            self.watch_input(x)
