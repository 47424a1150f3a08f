"""Packed column-parallel layers, such as q, k and v in one, must be split over the ranks part by part.

Where the forward that calls such a layer cuts what it returns into blocks, ``chunk``, ``split``, slices and views say
which features of this rank lie in which block. The forward is traced, but the layer returns a tensor of its shape. All
that cuts it are views of it, so that strides and offsets tell what they hold, in whatever words they are written.

``N`` output features of a layer on this rank.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeroresize.comm.collectives import group_rank
from zeroresize.integrations.changed_modules import own_hooks_off
from zeroresize.integrations.known_modules import is_elementwise_function, is_elementwise_module, name_of_function
from zeroresize.integrations.lora import base_of, outer_name
from zeroresize.integrations.module_state import nothing_kept
from zeroresize.integrations.traced_segments import ForwardTracer, arguments_of
from zeroresize.integrations.unit_proof import WatchedFunctions
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.torch_private import leaves_of

logger = logging.getLogger(__name__)

REMEDY = (
    "split it by zeroresize.ColwiseParallel(parts=...), or ColumnParallelLinear.from_linear(..., parts=...): how many "
    "equal parts it holds, or the features of each in the undivided layer, such as (q_rows, k_rows, v_rows)"
)
#: Sizes of the dimensions before the features, the first that fit what a forward does.
_BATCHES = ((2, 3), (6,), (2, 3, 5))
#: How many modules around a layer are traced, from the nearest on, until one shows what happens to its output.
_MOST_HOLDERS = 3
_JOINING = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")


def described(parts: Sequence[int] | None) -> str:
    """Return how a layer was split, for a message."""
    return "one part" if parts is None or len(parts) == 1 else f"parts={tuple(parts)}"


def require_right_parts(
    model: nn.Module, layers: Mapping[str, BalancedLinear], num_ranks: int, with_given_parts: Collection[str]
) -> None:
    """Check that the forwards of ``model`` cut no layer's output at other features than it was split at."""
    modules = dict(model.named_modules())
    for name, layer in layers.items():
        parts = layer.parts
        if not layer.is_column_parallel or layer.why_even is not None or (parts is None and name in with_given_parts):
            continue
        cuts, inner = _cuts_of(name, layer, modules)
        of_whole, here = layer.num_units_at_home, layer.home[group_rank(layer.process_group)]
        bounds = {end * here // of_whole for end in itertools.accumulate(parts or ())}
        wrong = next((operation for operation, ends in cuts.items() if not ends <= bounds), None)
        if wrong is not None and parts is None:
            logger.warning(
                "layer %s: %s cuts its output into blocks, which is right only if its weight holds this rank's share "
                "of each of them: say so by parts=, of the layer or of its zeroresize.Segment",
                name,
                wrong,
            )
        elif wrong is not None:
            raise ValueError(
                f"layer {name} was split over the ranks as {described(parts)}, and {wrong} cuts its output into blocks "
                f"elsewhere: on {num_ranks} ranks these are not the blocks of the undivided layer. {REMEDY}"
            )
        elif inner is not None and not cuts and len(parts or ()) > 1:
            raise ValueError(
                f"layer {name} was split over the ranks as {described(parts)}, and {inner} takes features of every "
                "head or group: its layout is interleaved. Split it without parts=, which cuts it between heads"
            )


def _cuts_of(name: str, layer: Any, modules: Mapping[str, nn.Module]) -> tuple[dict[str, set[int]], str | None]:
    """Which operations cut a layer's output into blocks, with the ends of these, and one that cuts every head."""
    holder = outer_name(name, modules)
    for _ in range(_MOST_HOLDERS):
        holder = holder.rpartition(".")[0]
        readings: list[_Reading] = []
        for holding in (None, layer):  # what cannot be traced may be another submodule's forward
            readings = [_reading(modules[holder], layer, holding, given) for given in arguments_of(modules[holder])[:2]]
            if any(reading.was_called for reading in readings):
                break
        cuts = {operation: ends for reading in readings for operation, ends in reading.cuts().items()}
        inner = next((reading.inner for reading in readings if reading.inner is not None), None)
        if cuts or inner or not holder or not any(each.is_returned or not each.was_called for each in readings):
            break
    return cuts, inner


def _reading(module: nn.Module, layer: Any, holding: nn.Module | None, arguments: dict[str, Any] | None) -> _Reading:
    """Trace a forward as far as that goes, for the first batch whose dimensions fit it."""
    for batch in _BATCHES:
        reading = _Reading(layer, holding, batch)
        if "forward" not in vars(module):
            with suppress(Exception), own_hooks_off(module), nothing_kept(module), WatchedFunctions(reading.call):
                reading.trace(module, concrete_args=arguments)
        if reading.fits:
            break
    return reading


class _Reading(ForwardTracer):
    """Runs what a forward does to a layer's output, as far as that shows features of it, and traces the rest.

    Attributes:
        was_called: whether the forward calls the layer.
        is_returned: whether its output leaves the forward uncut.
        is_complete: whether the forward was traced to its end.
        fits: whether the dimensions of the batch are such as what reads the output needs.
        inner: an operation that takes features of every head.
    """

    def __init__(self, layer: Any, holding: nn.Module | None, batch: tuple[int, ...]) -> None:
        super().__init__(holding)
        self.was_called = self.is_returned = self.is_complete = self._have_met = self._passes_whole = False
        self.fits = True
        self.inner: str | None = None
        self._layer, self._batch, self._size = layer, batch, layer.home_shape[0]
        self.shape = torch.Size((*batch, layer.even_shape[1]))
        #: Tensors with all features, by id.
        self._wholes: dict[int, Tensor] = {}
        #: Where blocks end, by the operation that makes them; which blocks a node has.
        self._ends: dict[str, set[int]] = {}
        self._blocks: dict[fx.Node, frozenset[tuple[int, int]]] = {}

    def cuts(self) -> dict[str, set[int]]:
        """Return where blocks end on this rank, for each operation that makes some, if they are told apart."""
        blocks = frozenset[tuple[int, int]]().union(*self._blocks.values())
        are_few = len(blocks) in (2, 3) or len({end - begin for begin, end in blocks}) > 1
        return self._ends if self._have_met or (not self.is_complete and are_few) else {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch that the forward calls."""
        given, name = leaves_of((args, kwargs)), name_of_function(function)
        whole = next((value for value in given if id(value) in self._wholes), None)
        if whole is None:
            return function(*args, **kwargs)
        if is_elementwise_function(name):
            return whole
        if name == "glu":
            self._have_met = True
            self._ends["glu()"] = {self._size // 2}
        if name == "glu" or any(isinstance(value, fx.Proxy) for value in given):
            return self.create_proxy("call_function", function, (), {})
        self.fits = False
        result = function(*args, **kwargs)
        self.fits = True
        if isinstance(result, tuple | list) and any(isinstance(piece, Tensor) for piece in result):
            return tuple(self._taken(function, piece, whole) for piece in result)
        return self._taken(function, result, whole) if isinstance(result, Tensor) else result

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if base_of(m) is self._layer:
            self.was_called = True
            return self._whole(torch.empty(*self._batch, self._size))
        if args and id(args[0]) in self._wholes:
            if is_elementwise_module(m):
                return args[0]
            if isinstance(m, nn.GLU | nn.Flatten | nn.Unflatten):
                return m.forward(*args)
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            self._passes_whole = self._passes_whole or id(a) in self._wholes
            return None
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        blocks = frozenset[tuple[int, int]]().union(*(self._blocks.get(each, ()) for each in node.all_input_nodes))
        if node.op == "output":
            self.is_complete, self.is_returned = True, self._passes_whole
        elif len(blocks) == 1:
            self._blocks[node] = blocks
        elif blocks and name_of_function(node.target) not in _JOINING:
            self._have_met = True
        self._passes_whole = False
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Shaped(node, self)

    def _whole(self, tensor: Tensor) -> Tensor:
        self._wholes[id(tensor)] = tensor
        return tensor

    def _taken(self, function: Any, result: Tensor, whole: Tensor) -> Any:
        """``result`` itself where it is a view of ``whole`` with all features; else what it holds is noted."""
        is_view = result.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        block = block_in(result, whole, self._size) if is_view else None
        if block == (0, self._size):
            return self._whole(result)
        proxy, cut = self.create_proxy("call_function", function, (), {}), f"{name_of_function(function)}()"
        if block is not None:
            self._ends[cut] = self._ends.get(cut, set()) | {*block} - {0, self._size}
            self._blocks[proxy.node] = frozenset((block,))
        elif is_view:
            self.inner = self.inner or cut
        return proxy


class _Shaped(fx.Proxy):
    """Stands for another tensor, taken for one like the layer's input."""

    def __getattr__(self, name: str) -> Any:
        shape = self.tracer.shape  # type: ignore[attr-defined]
        if name == "size":
            return lambda dim=None: shape if dim is None else shape[dim]
        return shape if name == "shape" else super().__getattr__(name)


def block_in(view: Tensor, whole: Tensor, size: int) -> tuple[int, int] | None:
    """Return which block of ``size`` features a view holds, (its first one, behind its last one).

    None where it holds only some features of every head.
    """
    begin, end, step, count = _features(view, size)
    if count == size:
        return 0, size
    outer = _features(whole, size)[2]
    has_one_head = any(length == 1 and step >= size for length, step in zip(whole.shape, whole.stride(), strict=True))
    begin, end = begin // outer * outer, -(-end // outer) * outer
    return None if step > outer or has_one_head or (begin, end) == (0, size) else (begin, end)


def _features(view: Tensor, size: int) -> tuple[int, int, int, int]:
    """(the first feature of a view, behind the last one, its largest step between two of them, how many)."""
    dims = [dim for dim in zip(view.shape, view.stride(), strict=True) if dim[0] > 1 and dim[1] < size]
    begin = int(view.storage_offset()) % size
    end = begin + 1 + sum((length - 1) * step for length, step in dims)
    return begin, end, max((step for _, step in dims), default=0), math.prod(length for length, _ in dims)
