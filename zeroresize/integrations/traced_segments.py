"""Segments of plain torch modules, proven by tracing the forward that holds their layers with ``torch.fx``.

A row-parallel layer ends a segment if all that its input follows from are outputs of column-parallel layers, by
operations that compute every feature by itself (:mod:`zeroresize.integrations.elementwise`), and if nothing else reads
what lies on the way. ``chunk(n, dim=-1)`` and ``glu`` of a column-parallel output are known, too: it then holds n
blocks, each with all units (gate and up in one).

A graph is what the forward did once. So it is traced under everything that a forward may ask for (training, gradients,
autocast, optional arguments), each time twice, and must keep no state and draw no random numbers. Before units move,
that is done again, each time once.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import operator
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from zeroresize.integrations.changed_modules import own_hooks_off, why_changed
from zeroresize.integrations.elementwise import (
    is_elementwise_function,
    is_elementwise_method,
    is_elementwise_module,
)
from zeroresize.integrations.hidden_state import library_of, nothing_kept
from zeroresize.integrations.unseen_questions import compares_arguments, unseen_question
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.unit_dropout import UnitDropout

#: Of a tensor, what says nothing of its features.
_METADATA = ("dtype", "device")
_OF_AUTOGRAD = ("grad", "grad_fn")
_TO_ANOTHER = ("to", "type_as")
#: What an argument may be that is compared by ``is``.
_SINGLE_VALUES = (True, False, None, "")
_KNOWING_PROXIES = ("torch", "zeroresize")


class NotProven(Exception):
    """With the reason as its text."""


class _NotTraced(NotProven):
    """``torch.fx`` does not understand a forward."""


class FromOutside(NotProven):
    """The input of a row-parallel layer comes from outside of the traced module."""


@dataclass(frozen=True)
class Found:
    """What a row-parallel layer's input follows from.

    Attributes:
        columns: the column-parallel layers, and how many blocks each of them holds.
        dropouts: dropout modules between, which are called nowhere else in the forward.
        has_other_dropout: whether another dropout lies between.
    """

    columns: dict[BalancedLinear, int]
    dropouts: tuple[nn.Module, ...]
    has_other_dropout: bool


@dataclass
class TracedModule:
    """The graphs of a module's forward under everything that it may ask for.

    Attributes:
        name: of the module in the model.
        num_times: that it is traced under each.
    """

    module: nn.Module
    name: str
    num_times: int = 2
    _graphs: dict[int, list[fx.Graph] | NotProven] = field(default_factory=dict)

    def segment_of(self, row: Any) -> Found:
        """The segment that ``row`` ends.

        Raises:
            FromOutside: if a larger module may show more.
            NotProven: with the reason.
        """
        failures: list[NotProven] = []
        for holding in (None, row):  # what cannot be traced may be another submodule's forward
            try:
                readings = [_found_in(graph, self.module, row) for graph in self._traced(holding)]
                if any(one.columns != readings[0].columns for one in readings):
                    raise NotProven(f"the layers before it depend on how {self._description} is called")
                dropouts = dict.fromkeys(module for one in readings for module in one.dropouts)
                return Found(readings[0].columns, tuple(dropouts), any(one.has_other_dropout for one in readings))
            except _NotTraced as error:
                failures.append(error)
            except NotProven as error:  # seen whole, it shows no more with less of it
                failures.append(error)
                break
        if any(isinstance(one, FromOutside) for one in failures):
            raise FromOutside("its input is no output of a column-parallel layer")
        raise next((one for one in failures if not isinstance(one, _NotTraced)), failures[0])

    @property
    def _description(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    def _traced(self, holding: nn.Module | None) -> list[fx.Graph]:
        known = self._graphs.get(id(holding))
        if known is None:
            try:
                known = list(_graphs(self.module, holding, self.num_times))
            except Exception as error:  # whatever a user's forward makes of a proxy
                lines = str(error).strip().splitlines()
                message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                message += _place_of(error)
                known = _NotTraced(f"torch.fx cannot trace {self._description}: {message}")
            self._graphs[id(holding)] = known
        if isinstance(known, NotProven):
            raise known
        return known


def _place_of(error: BaseException) -> str:
    """Where in a user's code it was raised."""
    places = [
        f" (in {frame.f_code.co_name}, {frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if library_of(frame.f_globals.get("__name__")) not in (*_KNOWING_PROXIES, "contextlib")
    ]
    return places[-1] if places else ""


class _TensorProxy(fx.Proxy):
    """Has the attributes of the tensor that it stands for, and no others; none can be set."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if name in _OF_AUTOGRAD:
            raise TypeError(f"it asks for {name} of a tensor")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.keys() >= {"tracer", "node"}:
            raise TypeError(f"it sets {name} of a tensor")
        super().__setattr__(name, value)


@contextmanager
def _proxies_are_tensors(optional: Collection[str]) -> Iterator[None]:
    """Code of users that asks whether a proxy is a tensor hears that it is, and calls no autograd function unseen.

    Of an ``optional`` argument nothing else is answered. Not so torch's own code, which knows proxies. A ``__class__``
    would be believed by its C code, too, which crashes.
    """
    is_instance, is_tensor = builtins.isinstance, torch.is_tensor
    apply = vars(torch.autograd.Function)["apply"]

    def asked(instance: Any, kinds: Any) -> bool:
        if (
            type(instance) is _TensorProxy
            and library_of(sys._getframe(1).f_globals.get("__name__")) not in _KNOWING_PROXIES
        ):
            answer = issubclass(torch.Tensor, kinds)
            if not answer and instance.node.op == "placeholder" and str(instance.node.target) in optional:
                raise TypeError(f"it asks what kind of object its argument {instance.node.target} is")
            return answer
        return is_instance(instance, kinds)

    def applied(kind: Any, *inputs: Any, **options: Any) -> Any:
        if library_of(kind.__module__) != "torch" and any(type(one) is _TensorProxy for one in inputs):
            raise TypeError(f"{kind.__name__} is an autograd function, whose backward is not seen")
        return apply.__get__(None, kind)(*inputs, **options)

    builtins.isinstance = asked
    torch.is_tensor = lambda obj: type(obj) is _TensorProxy or is_tensor(obj)  # type: ignore[assignment]
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        builtins.isinstance, torch.is_tensor = is_instance, is_tensor
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


class _Tracer(fx.Tracer):
    """Into containers and modules of the user, not into torch's own and parallel layers.

    Args:
        holding: if given, of the user's modules only those are entered that hold this layer.
    """

    def __init__(self, holding: nn.Module | None) -> None:
        super().__init__()
        self._holding = holding

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TensorProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BalancedLinear) or is_elementwise_module(m):
            return True
        if self._holding is not None and all(self._holding is not one for one in m.modules()):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def _graphs(module: nn.Module, holding: nn.Module | None, num_times: int) -> Iterator[fx.Graph]:
    """One of every circumstance.

    Raises:
        Exception: whatever the forward raises, and TypeError where it is not the same every time.
    """
    if "forward" in vars(module):  # fx would trace that of its class
        raise TypeError("its forward was replaced")
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for_arguments: list[dict[str, Any] | None] = [None, optional] if optional else [None]
    with _proxies_are_tensors(optional), own_hooks_off(module), nothing_kept(module) as codes:
        for arguments in for_arguments:
            yield from _under_modes(module, holding, num_times, arguments)
        if (asked := unseen_question(codes)) is not None:
            raise TypeError(asked)
        if compares_arguments(codes):
            for name, value in itertools.product(optional, _SINGLE_VALUES):
                with suppress(AttributeError, ValueError):  # no value for this argument
                    yield from _under_modes(module, holding, num_times, {**optional, name: value})


def _under_modes(
    module: nn.Module, holding: nn.Module | None, num_times: int, arguments: dict[str, Any] | None
) -> Iterator[fx.Graph]:
    flags = {one.training for one in module.modules()}
    for training in (True, False) if len(flags) == 1 else (True, False, None):
        for gradients, autocast in itertools.product((True, False), (False, True)):
            with _in_mode(module, training), torch.set_grad_enabled(gradients), _autocast(autocast):
                graphs = [_Tracer(holding).trace(module, concrete_args=arguments) for _ in range(num_times)]
            if any(_operations(again) != _operations(graphs[0]) for again in graphs[1:]):
                raise TypeError("its forward does not compute the same every time")
            yield graphs[0]


def _operations(graph: fx.Graph) -> list[tuple[str, str, str, str]]:
    """What a graph computes, such that it can be compared."""
    return [(node.op, str(node.target), repr(node.args), repr(node.kwargs)) for node in graph.nodes]


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """As if autocast were on or off, on every device; nothing is computed meanwhile."""
    flags: list[tuple[Any, Any]]
    if hasattr(torch, "get_autocast_dtype"):
        flags = [
            (functools.partial(torch.is_autocast_enabled, kind), functools.partial(torch.set_autocast_enabled, kind))
            for kind in ("cpu", "cuda")
        ]
    else:  # older versions of torch
        flags = [
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.is_autocast_cpu_enabled, torch.set_autocast_cpu_enabled),
        ]
    before = [is_enabled() for is_enabled, _ in flags]
    try:
        for _, enable in flags:
            enable(enabled)
        yield
    finally:
        for (_, enable), was in zip(flags, before, strict=True):
            enable(was)


@contextmanager
def _in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """While the block lasts, every submodule's flag says ``training``; None for what it says."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        for submodule, _ in before:
            submodule.training = submodule.training if training is None else training
        yield
    finally:
        for submodule, was in before:
            submodule.training = was


def _found_in(graph: fx.Graph, module: nn.Module, row: Any) -> Found:
    modules: Mapping[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    calls = [node for node in graph.nodes if _module_of(node, modules) is row]
    if not calls:
        raise NotProven(f"the forward of {type(module).__name__} does not call it")
    walks = [_walk_back(call, modules) for call in calls]
    first, _ = walks[0]
    if any(columns != first for columns, _ in walks):
        raise NotProven("it is called with outputs of different layers")
    _require_unread([*first, row], graph, modules)
    on_the_way = {node for _, nodes in walks for node in nodes}
    for node in graph.nodes:
        called: Any = _module_of(node, modules)
        if called in first and node not in on_the_way:
            raise NotProven(f"{node.target} is called for something else, too")
    for node in on_the_way:
        for user in node.users:
            if user not in on_the_way and user not in calls and not _is_metadata(user):
                raise NotProven(f"what {_described(node)} returns is also used by {_described(user)}")
    return Found(first, *_dropouts(graph, on_the_way, modules))


def _require_unread(layers: Sequence[Any], graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Nothing but the layers themselves reads or changes what they hold: it is of other units on every rank."""
    for node in graph.nodes:
        if node.op == "get_attr" and not all(map(_is_metadata, node.users)):
            holder, _, _ = str(node.target).rpartition(".")
            if any(modules.get(holder) is layer for layer in layers):
                raise NotProven(f"the forward uses {node.target} itself")


def _dropouts(
    graph: fx.Graph, on_the_way: set[fx.Node], modules: Mapping[str, nn.Module]
) -> tuple[tuple[nn.Module, ...], bool]:
    """Dropout modules that are called on the way only, and whether there is another dropout on it."""
    dropouts: dict[nn.Module, None] = {}
    calls = {node: module for node in graph.nodes if (module := _module_of(node, modules)) is not None}
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
    """From a row-parallel layer's input to the column-parallel layers: these, and all nodes on the way."""
    columns: dict[BalancedLinear, int] = {}
    blocks_of: dict[fx.Node, int] = {}
    todo = [(node, 1) for node in call.all_input_nodes]
    while todo:
        node, num_blocks = todo.pop()
        if node in blocks_of:
            if blocks_of[node] != num_blocks:
                raise NotProven(f"its input mixes parts of what {_described(node)} returns")
            continue
        blocks_of[node] = num_blocks
        layer: Any = _module_of(node, modules)
        if isinstance(layer, BalancedLinear):
            if not layer.is_column_parallel:
                raise NotProven(f"its input follows from what {node.target} returns, which is row-parallel")
            if columns.setdefault(layer, num_blocks) != num_blocks:
                raise NotProven(f"it reads {node.target} in two ways")
        else:
            todo += _inputs_of(node, num_blocks, modules)
    return columns, set(blocks_of)


def _inputs_of(node: fx.Node, num_blocks: int, modules: Mapping[str, nn.Module]) -> list[tuple[fx.Node, int]]:
    """What ``node`` computes feature by feature, and how many blocks each of them holds if the node holds so many."""
    if node.op == "placeholder":
        raise FromOutside
    if node.op == "get_attr":
        raise NotProven(f"what lies between is not element-wise: it uses the tensor {node.target}")
    module = _module_of(node, modules)
    if module is not None and is_elementwise_module(module):
        changed = why_changed(module)
        if changed is not None:
            raise NotProven(f"{node.target} {changed}")
        return [(one, num_blocks) for one in node.all_input_nodes]
    if _is_glu(node, modules):
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
        description = _described(node) if module is None else f"{node.target} ({type(module).__name__})"
        raise NotProven(f"what lies between is not proven element-wise: {description}")
    inputs = node.all_input_nodes
    if is_method and node.target in _TO_ANOTHER:
        inputs = [one for one in node.args[:1] if isinstance(one, fx.Node)]
    return [(one, num_blocks) for one in inputs if not _is_metadata(one)]


def _module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that ``node`` calls, None where it calls none."""
    return modules[str(node.target)] if node.op == "call_module" else None


def _num_chunks(node: fx.Node) -> int:
    """n of ``x.chunk(n, dim=-1)``, 0 for any other node."""
    is_chunk = (node.op == "call_method" and node.target == "chunk") or node.target is torch.chunk
    if not is_chunk:
        return 0
    _, chunks, dim = (*node.args, *(None, None))[:3]
    chunks, dim = node.kwargs.get("chunks", chunks), node.kwargs.get("dim", dim)
    return chunks if dim == -1 and isinstance(chunks, int) else 0


def _is_glu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    module: Any = _module_of(node, modules)
    if module is not None:
        return type(module) is nn.GLU and module.dim == -1 and why_changed(module) is None
    is_glu = node.op == "call_function" and node.target is F.glu
    return is_glu and bool(node.kwargs.get("dim", (*node.args, -1)[1]) == -1)


def _is_metadata(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] in _METADATA


def _described(node: fx.Node) -> str:
    if node.op == "output":
        return "the module's caller"
    if node.op in ("call_module", "get_attr", "placeholder"):
        return str(node.target)
    return f"{getattr(node.target, '__name__', node.target)}()"
