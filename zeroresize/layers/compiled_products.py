"""The products of balanced layers as operators of torch, so that ``torch.compile`` puts a model of them into one graph.

A compiled graph holds only a layer's number. What changes between two steps (plan, loans, probes, watchers) is read
from the layer whenever the graph runs, so that none of it compiles anew. The operators have an order of their own:
ranks whose weights have other shapes would otherwise meet in other collectives. A backward waits for the lent columns
of its dw itself, since what comes after all layers is outside of the graph. ``K`` input and ``N`` output features.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroresize.layers.functional import SharedProducts, column_backward, column_forward, row_backward, row_forward
from zeroresize.plan.layer import LayerPlan
from zeroresize.utils.torch_private import (
    FakeTensor,
    constant_in_graphs,
    is_checkpointed_in_graph,
    keep_order_in_graphs,
    leave_graph,
    let_shapes_of_parameters_vary,
)

#: So many plans a layer remembers for backwards of forwards that lie before a change of plan.
_MOST_PLANS = 8


class _Lent(bytearray):
    """What the backward of a forward with loans needs besides the graph's tensors.

    The tensor with its number lies in this array's bytes and so keeps it, until autograd is done with that tensor.
    """

    plan: LayerPlan | None
    loans: SharedProducts
    kept: Sequence[Tensor]


class CompiledForwards:
    """Keeps what a graph needs of one layer besides tensors."""

    def __init__(self, layer: Any) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        self._plans: deque[tuple[int, LayerPlan]] = deque(maxlen=_MOST_PLANS)
        self._num_plans = self._num_lent = 0
        self._lent: weakref.WeakValueDictionary[int, _Lent] = weakref.WeakValueDictionary()
        _layers[number] = layer

    def number_of(self, plan: LayerPlan | None, loans: SharedProducts | None, kept: Sequence[Tensor]) -> Tensor:
        """Return the number under which a backward finds what its forward was computed by, int64 on the CPU."""
        if loans is not None:
            self._num_lent += 1
            self._lent[-self._num_lent] = lent = _Lent(8)
            lent.plan, lent.loans, lent.kept = plan, loans, kept
            return torch.frombuffer(lent, dtype=torch.int64).view(()).fill_(-self._num_lent)
        if plan is not None and not (self._plans and self._plans[-1][1] is plan):
            self._num_plans += 1
            self._plans.append((self._num_plans, plan))
        return torch.tensor(0 if plan is None else self._num_plans, device="cpu")

    def made_by(self, number: int) -> tuple[LayerPlan | None, SharedProducts | None, Sequence[Tensor]]:
        """Return what :meth:`number_of` was given."""
        if number < 0:
            lent = self._lent.get(number)
            if lent is None:
                raise KeyError(
                    "hooks of saved tensors have copied what a compiled forward saved while columns were lent, as "
                    "save_on_cpu(pin_memory=True) does; leave such hooks out, or do not compile the layer"
                )
            return lent.plan, lent.loans, lent.kept
        plan = dict(self._plans).get(number)
        if number and plan is None:
            raise KeyError(
                f"a compiled backward came more than {_MOST_PLANS} changes of plan after its forward; call backward "
                "before balancer.step()"
            )
        return plan, None, ()


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def compiled_products(
    kind: str, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, number: Tensor, is_training: bool, sums: bool
) -> Tensor:
    """Compute, in a graph, the products of a ``kind`` of layer, "column" or "row", as the functions of that name do."""
    if _graph_begins():
        leave_graph("converted layers in a checkpointed part of a graph: compile what is checkpointed instead")
    compute = torch.ops.zeroresize.column_products if kind == "column" else torch.ops.zeroresize.row_products
    y, _ = compute(x, w_NK, bias_N, number, is_training, sums)
    return y


@constant_in_graphs
def _graph_begins() -> bool:
    """Called when layers are compiled, not when they run; tells whether that is within a checkpointed part."""
    from torch.utils.flop_counter import flop_registry  # it imports Triton

    let_shapes_of_parameters_vary()
    for name in ("column_products", "row_products"):
        flop_registry[getattr(torch.ops.zeroresize, name)] = _flops_of_forward
        flop_registry[getattr(torch.ops.zeroresize, f"{name}_backward")] = _flops_of_backward
    return is_checkpointed_in_graph()


def _forward(kind: Any, x: Tensor, w_NK: Tensor, bias_N: Any, number: Tensor, is_training: bool, sums: bool) -> Any:
    layer = _layers[int(number)]
    how = layer.compiled_forward_begins(x, is_training, sums)
    y, kept = kind(x, w_NK, bias_N, how)
    return y.contiguous(), layer.forwards.number_of(how.plan, how.loans, kept)


def _backward(
    kind: Any,
    dy: Tensor,
    x: Tensor,
    w_NK: Tensor,
    number: Tensor,
    of_forward: Tensor,
    needed: list[bool],
    is_training: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layer = _layers[int(number)]
    try:
        plan, loans, kept = layer.forwards.made_by(int(of_forward))
    except KeyError as unknown:
        name = f"layer {layer.name_in_model}" if layer.name_in_model else "a layer"
        raise RuntimeError(f"{name}: {unknown.args[0]}") from None
    dx, dw_NK, db_N = kind(dy, x, w_NK, kept, layer.context_of(plan, loans, is_training, sums), needed)
    if loans is not None and dw_NK is not None:
        dw_NK = loans.whole_gradient(dw_NK)
    if layer.shared_rows is not None:
        where = layer.process_group, layer.name_in_model
        if layer.is_column_parallel:
            dw_NK, db_N = layer.shared_rows.summed((dw_NK, db_N), *where)
        else:
            (dw_NK,) = layer.shared_rows.summed((dw_NK,), *where)
    computed = dx, dw_NK, db_N
    dx, dw_NK, db_N = (dy.new_empty(0) if gradient is None else gradient.contiguous() for gradient in computed)
    return dx, dw_NK, db_N


def _like_forward(x: Tensor, w_NK: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """The shapes of a forward's results."""
    return x.new_empty((*x.shape[:-1], w_NK.shape[0])), torch.empty((), dtype=torch.int64, device="cpu")


def _like_backward(
    dy: Tensor, x: Tensor, w_NK: Tensor, number: Tensor, of_forward: Tensor, needed: list[bool], *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of a backward's results; of size 0 where a gradient is not needed."""
    dx, dw_NK, db_N = (
        dy.new_empty(shape if is_needed else (0,))
        for shape, is_needed in zip((x.shape, w_NK.shape, (w_NK.shape[0],)), needed, strict=True)
    )
    return dx, dw_NK, db_N


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_NK, bias_N, number, ctx.is_training, ctx.sums = inputs
    ctx.save_for_backward(x, w_NK, number, output[1])
    ctx.has_bias = bias_N is not None


def _gradients(operator: Any, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w_NK, number, of_forward = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
    gradients = operator(dy, x, w_NK, number, of_forward, needed, ctx.is_training, ctx.sums)
    dx, dw_NK, db_N = (gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True))
    return dx, dw_NK, db_N, None, None, None


def _flops_of_forward(
    x: Tensor, w_NK: Tensor, bias_N: Any, number: Tensor, *_: Any, out_val: tuple[Tensor, Tensor], **others: Any
) -> int:
    return _flops(x, w_NK, number, out_val[1], 1)


def _flops_of_backward(
    dy: Tensor, x: Tensor, w_NK: Tensor, number: Tensor, of_forward: Tensor, needed: list[bool], *_: Any, **out: Any
) -> int:
    return _flops(x, w_NK, number, of_forward, sum(needed[:2]))


def _flops(x: Tensor, w_NK: Tensor, number: Tensor, of_forward: Tensor, num_products: int) -> int:
    """Those of kept and borrowed columns; of all columns where tensors are fake, which tell no plan."""
    num_multiplied = w_NK.numel()
    if not isinstance(number, FakeTensor):
        plan, loans, _ = _layers[int(number)].forwards.made_by(int(of_forward))
        num_multiplied = num_multiplied if plan is None else len(w_NK) * len(plan.keep_P)
        num_multiplied += 0 if loans is None else loans.num_borrowed
    return 2 * num_products * math.prod(x.shape[:-1]) * num_multiplied


def _define(name: str, forward: Any, backward: Any) -> None:
    """Make the operators ``zeroresize::<name>`` and ``zeroresize::<name>_backward``."""
    operands = "Tensor x, Tensor w_NK, "
    products = torch.library.custom_op(
        f"zeroresize::{name}",
        lambda *inputs: _forward(forward, *inputs),
        mutates_args=(),
        tags=_TAGS,
        schema=f"({operands}Tensor? bias_N, Tensor number, bool is_training, bool sums) -> (Tensor, Tensor)",
    )
    gradients = torch.library.custom_op(
        f"zeroresize::{name}_backward",
        lambda *inputs: _backward(backward, *inputs),
        mutates_args=(),
        tags=_TAGS,
        schema=f"(Tensor dy, {operands}Tensor number, Tensor of_forward, bool[] needed, bool is_training, bool sums)"
        " -> (Tensor, Tensor, Tensor)",
    )
    products.register_fake(_like_forward)
    gradients.register_fake(_like_backward)
    operator = getattr(torch.ops.zeroresize, f"{name}_backward")
    products.register_autograd(lambda ctx, dy, _: _gradients(operator, ctx, dy), setup_context=_remember)
    keep_order_in_graphs(getattr(torch.ops.zeroresize, name).default)
    keep_order_in_graphs(operator.default)


# What a replayed CUDA graph does not run, Python, is what these operators are for.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_define("column_products", column_forward, column_backward)
_define("row_products", row_forward, row_backward)
