"""What a graph tells of a segment: which column-parallel layers a row-parallel layer's input follows from.

A row-parallel layer ends a segment if all that its input follows from are outputs of column-parallel layers, by
operations that compute every feature by itself (:mod:`zeroresize.integrations.elementwise`), and if nothing else reads
what lies on the way. ``chunk(n, dim=-1)`` and ``glu`` of a column-parallel output are known, too: it then holds n
blocks, each with all units (gate and up in one).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from zeroresize.integrations.changed_modules import why_changed
from zeroresize.integrations.elementwise import is_elementwise_function, is_elementwise_method, is_elementwise_module
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.unit_dropout import UnitDropout

#: Of a tensor, what says nothing of its features.
_METADATA = ("dtype", "device")
_TO_ANOTHER = ("to", "type_as")


class NotProven(Exception):
    """Raised where no segment is proven; the reason is its text."""


class FromOutside(NotProven):
    """Raised where the input of a row-parallel layer comes from outside of the traced module."""


@dataclass(frozen=True)
class TracedSegment:
    """Names what a row-parallel layer's input follows from.

    Attributes:
        columns: maps the column-parallel layers to how many blocks each of them holds.
        dropouts: are dropout modules between, which are called nowhere else in the forward.
        has_other_dropout: tells whether another dropout lies between.
    """

    columns: dict[BalancedLinear, int]
    dropouts: tuple[nn.Module, ...]
    has_other_dropout: bool


def read_segment(graph: fx.Graph, module: nn.Module, row: Any) -> TracedSegment:
    """Prove from the graph of a module's forward which segment the row-parallel layer ``row`` ends.

    Raises:
        FromOutside: if the graph of a larger module may show more.
        NotProven: with the reason, if it ends none that the graph shows.
    """
    modules: Mapping[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    calls = [node for node in graph.nodes if module_of(node, modules) is row]
    if not calls:
        raise NotProven(f"the forward of {type(module).__name__} does not call it")
    walks = [_walk_back(call, modules) for call in calls]
    first, _ = walks[0]
    if any(columns != first for columns, _ in walks):
        raise NotProven("it is called with outputs of different layers")
    _require_unread([*first, row], graph, modules)
    on_the_way = {node for _, nodes in walks for node in nodes}
    for node in graph.nodes:
        called: Any = module_of(node, modules)
        if called in first and node not in on_the_way:
            raise NotProven(f"{node.target} is called for something else, too")
    for node in on_the_way:
        for user in node.users:
            if user not in on_the_way and user not in calls and not _is_metadata(user):
                raise NotProven(f"what {described(node)} returns is also used by {described(user)}")
    return TracedSegment(first, *_dropouts(graph, on_the_way, modules))


def _require_unread(layers: Sequence[Any], graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Check that only the layers read or change what they hold, which is of other units on every rank."""
    for node in graph.nodes:
        if node.op == "get_attr" and not all(map(_is_metadata, node.users)):
            holder, _, _ = str(node.target).rpartition(".")
            if any(modules.get(holder) is layer for layer in layers):
                raise NotProven(f"the forward uses {node.target} itself")


def _dropouts(
    graph: fx.Graph, on_the_way: set[fx.Node], modules: Mapping[str, nn.Module]
) -> tuple[tuple[nn.Module, ...], bool]:
    """Return dropout modules that are called on the way only, and whether another dropout lies on it."""
    dropouts: dict[nn.Module, None] = {}
    calls = {node: module for node in graph.nodes if (module := module_of(node, modules)) is not None}
    has_other = False
    for node in graph.nodes:
        if node not in on_the_way:
            continue
        module = calls.get(node)
        if isinstance(module, nn.Dropout | UnitDropout) and all(
            call in on_the_way for call, called in calls.items() if called is module
        ):
            dropouts[module] = None
        elif isinstance(module, nn.Dropout | nn.AlphaDropout) or getattr(node.target, "__name__", "") == "dropout":
            has_other = True
    return tuple(dropouts), has_other


def _walk_back(call: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[dict[BalancedLinear, int], set[fx.Node]]:
    """Walk from a row-parallel layer's input to column-parallel layers; return these, and all nodes on the way."""
    columns: dict[BalancedLinear, int] = {}
    blocks_of: dict[fx.Node, int] = {}
    todo = [(node, 1) for node in call.all_input_nodes]
    while todo:
        node, num_blocks = todo.pop()
        if node in blocks_of:
            if blocks_of[node] != num_blocks:
                raise NotProven(f"its input mixes parts of what {described(node)} returns")
            continue
        blocks_of[node] = num_blocks
        layer: Any = module_of(node, modules)
        if isinstance(layer, BalancedLinear):
            if not layer.is_column_parallel:
                raise NotProven(f"its input follows from what {node.target} returns, which is row-parallel")
            if columns.setdefault(layer, num_blocks) != num_blocks:
                raise NotProven(f"it reads {node.target} in two ways")
        else:
            todo += _inputs_of(node, num_blocks, modules)
    return columns, set(blocks_of)


def _inputs_of(node: fx.Node, num_blocks: int, modules: Mapping[str, nn.Module]) -> list[tuple[fx.Node, int]]:
    """Return what ``node`` computes feature by feature, with the number of blocks that each of them holds."""
    if node.op == "placeholder":
        raise FromOutside
    if node.op == "get_attr":
        raise NotProven(f"what lies between is not element-wise: it uses the tensor {node.target}")
    module = module_of(node, modules)
    if module is not None and is_elementwise_module(module):
        changed = why_changed(module)
        if changed is not None:
            raise NotProven(f"{node.target} {changed}")
        return [(one, num_blocks) for one in node.all_input_nodes]
    if is_glu(node, modules):
        return [(one, 2 * num_blocks) for one in node.all_input_nodes]
    if node.op == "call_function" and node.target is operator.getitem:
        whole, index = node.args
        if isinstance(whole, fx.Node) and isinstance(index, int) and (parts := _num_chunks(whole)):
            return [(whole, parts * num_blocks)]
    if _num_chunks(node) and isinstance(node.args[0], fx.Node):
        return [(node.args[0], num_blocks)]
    is_function = node.op == "call_function" and is_elementwise_function(node.target)
    is_method = node.op == "call_method" and is_elementwise_method(str(node.target))
    if not (is_function or is_method):
        description = described(node) if module is None else f"{node.target} ({type(module).__name__})"
        raise NotProven(f"what lies between is not proven element-wise: {description}")
    inputs = node.all_input_nodes
    if is_method and node.target in _TO_ANOTHER:
        inputs = [one for one in node.args[:1] if isinstance(one, fx.Node)]
    return [(one, num_blocks) for one in inputs if not _is_metadata(one)]


def module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module that ``node`` calls, None where it calls none."""
    return modules[str(node.target)] if node.op == "call_module" else None


def _num_chunks(node: fx.Node) -> int:
    """Return n of ``x.chunk(n, dim=-1)``, 0 for any other node."""
    is_chunk = (node.op == "call_method" and node.target == "chunk") or node.target is torch.chunk
    if not is_chunk:
        return 0
    _, chunks, dim = (*node.args, *(None, None))[:3]
    chunks, dim = node.kwargs.get("chunks", chunks), node.kwargs.get("dim", dim)
    return chunks if dim == -1 and isinstance(chunks, int) else 0


def is_glu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    module: Any = module_of(node, modules)
    if module is not None:
        return type(module) is nn.GLU and module.dim == -1 and why_changed(module) is None
    is_glu = node.op == "call_function" and node.target is F.glu
    return is_glu and bool(node.kwargs.get("dim", (*node.args, -1)[1]) == -1)


def _is_metadata(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] in _METADATA


def described(node: fx.Node) -> str:
    if node.op == "output":
        return "the module's caller"
    if node.op in ("call_module", "get_attr", "placeholder"):
        return str(node.target)
    return f"{getattr(node.target, '__name__', node.target)}()"
