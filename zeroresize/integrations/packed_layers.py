"""Packed column-parallel layers, such as q, k and v in one, must be split over the ranks part by part.

Where the forward that calls such a layer cuts what it returns into blocks, ``chunk``, ``split``, slices and views say
which features of this rank lie in which block. The operations behind the layer are run on a tensor of its shape. All of
them are views of it, so that strides and offsets tell what they hold, in whatever words they are written.

``N`` output features of a layer on this rank.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeroresize.integrations.elementwise import is_elementwise_function, is_elementwise_method, is_elementwise_module
from zeroresize.integrations.forward_graphs import graphs_as_far_as_traced
from zeroresize.integrations.graph_reading import described as described_node
from zeroresize.integrations.graph_reading import is_glu, module_of
from zeroresize.layers.balanced_linear import BalancedLinear

logger = logging.getLogger(__name__)

REMEDY = (
    "split it by zeroresize.ColwiseParallel(parts=...), or ColumnParallelLinear.from_linear(..., parts=...): how many "
    "equal parts it holds, or the features of each in the undivided layer, such as (q_rows, k_rows, v_rows)"
)
#: Sizes of the dimensions before the features, the first that fit what a forward does.
_BATCHES = ((2, 3), (6,), (2, 3, 5))
#: How many modules around a layer are traced, from the nearest on, until one shows what happens to its output.
_MOST_HOLDERS = 3
#: Libraries whose functions are run.
_RUN = ("torch", "_operator", "builtins", "math", "einops")
_JOINING = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")


def described(parts: Sequence[int] | None) -> str:
    """Return how a layer was split, for a message."""
    return "one part" if parts is None or len(parts) == 1 else f"parts={tuple(parts)}"


def require_right_parts(
    model: nn.Module, layers: Mapping[str, BalancedLinear], num_ranks: int, with_given_parts: Collection[str]
) -> None:
    """Check that the forwards of ``model`` cut no layer's output at other features than it was split at.

    Args:
        with_given_parts: layers of which somebody has said how their weights are packed on a rank.

    Raises:
        ValueError: naming a layer and the operation that cuts its output, where these are not the undivided blocks.
    """
    modules = dict(model.named_modules())
    graphs: dict[tuple[int, int], list[fx.Graph]] = {}
    for name, layer in layers.items():
        parts = layer.parts
        if not layer.is_column_parallel or layer.why_even is not None or (parts is None and name in with_given_parts):
            continue
        cuts, inner = _cuts_of(name, layer, modules, graphs)
        bounds = {end // num_ranks for end in itertools.accumulate(parts or ())}
        wrong = next((node for node, ends in cuts.items() if not ends <= bounds), None)
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


def _cuts_of(
    name: str, layer: Any, modules: Mapping[str, nn.Module], graphs: dict[tuple[int, int], list[fx.Graph]]
) -> tuple[dict[str, frozenset[int]], str | None]:
    """Which operations cut a layer's output into blocks, with the ends of these, and one that cuts every head."""
    holder = name
    for _ in range(_MOST_HOLDERS):
        holder = holder.rpartition(".")[0]
        readings = []
        for holding in (None, layer):  # what cannot be traced may be another submodule's forward
            key = id(modules[holder]), id(holding)
            if key not in graphs:
                graphs[key] = list(graphs_as_far_as_traced(modules[holder], holding))
            readings = [_Reading(graph, modules[holder], layer) for graph in graphs[key]]
            if any(reading.was_called for reading in readings):
                break
        cuts = {node: ends for reading in readings for node, ends in reading.wrong_unless().items()}
        inner = next((reading.inner for reading in readings if reading.inner is not None), None)
        if cuts or inner or not holder or not any(one.is_returned or not one.was_called for one in readings):
            break
    return cuts, inner


class _Reading:
    """Runs what a graph does to a layer's output, as far as that shows features of it.

    Attributes:
        was_called: whether the graph calls the layer.
        is_returned: whether its output leaves the graph uncut.
        inner: an operation that takes features of every head.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, layer: Any) -> None:
        self._graph, self._layer = graph, layer
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._size, self._num_inputs = layer.even_shape
        for self._batch in _BATCHES:
            self.was_called = self.is_returned = self._have_met = False
            self.inner: str | None = None
            self._ends: dict[str, frozenset[int]] = {}
            self._values: dict[fx.Node, Any] = {}
            self._blocks: dict[fx.Node, frozenset[Any]] = {}
            self._origins: dict[fx.Node, tuple[fx.Node, Tensor]] = {}
            try:
                for node in graph.nodes:
                    self._read(node)
            except (IndexError, RuntimeError, TypeError, ValueError):  # another number of dimensions, mostly
                continue
            break

    def wrong_unless(self) -> dict[str, frozenset[int]]:
        """Return where blocks end on this rank, for each operation that makes some, if they are told apart.

        Blocks that only join again are not, such as heads that are computed one after the other.
        """
        blocks = frozenset().union(*self._blocks.values())
        is_whole = any(node.op == "output" for node in self._graph.nodes)
        sizes = {end - begin for begin, end in blocks}
        are_few = len(blocks) in (2, 3) or len(sizes) > 1
        return self._ends if self._have_met or (not is_whole and are_few) else {}

    def _read(self, node: fx.Node) -> None:
        module, inputs = module_of(node, self._modules), node.all_input_nodes
        blocks = frozenset().union(*(self._blocks.get(one, frozenset()) for one in inputs))
        if len(blocks) > 1:
            self._have_met = self._have_met or not (node.op == "output" or _name(node) in _JOINING)
        elif blocks:
            self._blocks[node] = blocks
        if module is self._layer:
            self.was_called = True
            self._values[node] = torch.empty(*self._batch, self._size)
            return
        known = [self._values[one] for one in inputs if one in self._values]
        whole = next((one for one in known if isinstance(one, Tensor)), None)
        if whole is not None and node.op == "output":
            self.is_returned = True
        elif whole is not None and is_glu(node, self._modules):
            self._have_met = True
            self._ends[described_node(node)] = frozenset((self._size // 2,))
        elif whole is not None and _is_elementwise(node, module):
            self._values[node] = whole
        elif not known and _name(node) in ("shape", "size"):
            shape = torch.Size((*self._batch, self._num_inputs))
            dim: Any = node.args[1] if node.op == "call_method" and len(node.args) > 1 else slice(None)
            self._values[node] = shape[dim]
        elif known and len(known) == len(inputs) and (result := self._run(node, module)) is not None:
            origin = self._origins.get(inputs[0]) if whole is None else (node, whole)
            if isinstance(result, tuple | list) and origin is not None:
                self._origins[node] = origin
                for piece in () if node.users else result:  # the graph ends in a loop over them
                    self._is_whole(node, piece, *origin)
            if not isinstance(result, Tensor) or origin is None or self._is_whole(node, result, *origin):
                self._values[node] = result

    def _run(self, node: fx.Node, module: nn.Module | None) -> Any:
        """What ``node`` computes; None if that cannot be known."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        library = str(getattr(node.target, "__module__", "torch") or "torch").partition(".")[0]
        if node.op == "call_function" and library in _RUN:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        return module(*args, **kwargs) if isinstance(module, nn.Flatten | nn.Unflatten) else None

    def _is_whole(self, node: fx.Node, result: Tensor, cutting: fx.Node, whole: Tensor) -> bool:
        """Whether ``result`` is a view of ``whole`` that holds all features; else what it holds is noted."""
        if result.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return False
        block, cut = block_in(result, whole, self._size), described_node(cutting)
        if block is None:
            self.inner = self.inner or cut
        elif block != (0, self._size):
            self._ends[cut] = self._ends.get(cut, frozenset()) | {*block} - {0, self._size}
            self._blocks[node] = self._blocks.get(node, frozenset()) | {block}
        return block == (0, self._size)


def block_in(view: Tensor, whole: Tensor, size: int) -> tuple[int, int] | None:
    """Return which block of ``size`` features a view holds, (its first one, behind its last one).

    Args:
        whole: what it is a view of, which holds them all, as heads where strides tell so.

    Returns:
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


def _name(node: fx.Node) -> str:
    """Of the method, the function or the attribute that a node asks for."""
    if node.target is getattr:
        return str(node.args[1])
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _is_elementwise(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return is_elementwise_module(module)
    if node.op == "call_method":
        return is_elementwise_method(str(node.target))
    return node.op == "call_function" and is_elementwise_function(node.target)
