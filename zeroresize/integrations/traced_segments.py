"""Segments of plain torch modules, proven from the forward that holds them: by a list of operations, and numbers.

``torch.fx`` traces the forward, as nobody knows the shapes of its inputs, as often as it may compute something else: in
training and evaluation, with and without autocast, with optional arguments given or not. But column-parallel layers
return numbers (:class:`~zeroresize.integrations.unit_proof.Stimulus`), so that what follows from them is computed. Only
operations that are known to be element-wise may use these on their way to the row-parallel layer, and nothing else may
use them at all; a forward must keep nothing meanwhile, and draw no random numbers. Before units move, that is done
again.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeroresize.integrations.changed_modules import own_hooks_off, why_changed
from zeroresize.integrations.known_modules import is_elementwise_function, is_elementwise_module, name_of_function
from zeroresize.integrations.lora import base_of
from zeroresize.integrations.module_state import in_mode, nothing_kept
from zeroresize.integrations.unit_proof import MixesUnitsError, Stimulus, WatchedFunctions, require_unmixed
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.utils.torch_private import leaves_of

#: Of a tensor, what says nothing of its features.
_METADATA = ("dtype", "device")
#: Of a column-parallel output these make the blocks that it holds, each with all units; numbers tell whether they do.
_OF_BLOCKS = ("chunk", "glu")
_Columns = frozenset[Any]


class NotProven(Exception):
    """Raised where no segment is proven; the reason is its text."""


class FromOutside(NotProven):
    """Raised where the input of a row-parallel layer comes from outside of the traced module."""


@dataclass(frozen=True)
class TracedSegment:
    """Says what a row-parallel layer's input follows from."""

    columns: dict[BalancedLinear, int]  # the column-parallel layers, with how many blocks each of them holds
    dropouts: tuple[nn.Module, ...]  # dropout modules between, which are called nowhere else in the forward
    has_other_dropout: bool  # whether another dropout lies between


def traced_segment(module: nn.Module, name: str, row: Any) -> TracedSegment:
    """Prove which segment the row-parallel layer ``row`` in ``module``, which the model calls ``name``, ends."""
    described = f"{name or 'the model'} ({type(module).__name__})"
    failure: NotProven | None = None
    for holding in (None, row):  # what cannot be traced may be another submodule's forward
        try:
            return _read(module, described, row, holding)
        except NotProven:  # seen whole, it shows no more with less of it
            raise
        except MixesUnitsError as error:
            raise NotProven(f"{described}, computed with numbers: {_line_of(error)}") from error
        except Exception as error:  # whatever a user's forward makes of a proxy
            failure = failure or NotProven(f"torch.fx cannot trace {described}: {_line_of(error)}")
    assert failure is not None
    raise failure


def _read(module: nn.Module, described: str, row: Any, holding: nn.Module | None) -> TracedSegment:
    size = row.whole_size
    columns = {
        layer: (1,) * (layer.whole_size // size)
        for layer in module.modules()
        if isinstance(layer, BalancedLinear) and layer.is_column_parallel and layer.whole_size % size == 0
    }
    readings: list[TracedSegment] = []

    def compute(stimulus: Stimulus) -> None:
        def trace(arguments: dict[str, Any] | None) -> None:
            tracer = _StimulatedTracer(holding, stimulus)
            tracer.trace(module, concrete_args=arguments)
            readings.append(tracer.reading())

        _under_every_circumstance(module, trace)

    require_unmixed(columns, row, 1, compute)
    if any(reading.columns != readings[0].columns for reading in readings):
        raise NotProven(f"the layers before it depend on how {described} is called")
    dropouts = dict.fromkeys(dropout for reading in readings for dropout in reading.dropouts)
    return TracedSegment(readings[0].columns, tuple(dropouts), any(reading.has_other_dropout for reading in readings))


class ForwardTracer(fx.Tracer):
    """Enters containers and modules of the user, not torch's and parallel layers.

    Args:
        holding: if given, of the user's modules only those are entered that hold this layer.
    """

    proxy_buffer_attributes = True

    def __init__(self, holding: nn.Module | None) -> None:
        leaves: Any = [sys.modules[name] for name in ("math", "einops") if name in sys.modules]
        super().__init__(autowrap_modules=leaves)
        self._holding = holding

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(base_of(m), BalancedLinear) or is_elementwise_module(m):
            return True
        if self._holding is not None and all(self._holding is not module for module in m.modules()):
            return True
        return super().is_leaf_module(m, module_qualified_name)


class _StimulatedTracer(ForwardTracer):
    """Computes with numbers what follows from a stimulus by element-wise operations, and traces the rest."""

    def __init__(self, holding: nn.Module | None, stimulus: Stimulus) -> None:
        super().__init__(holding)
        self._stimulus = stimulus
        stimulus.begin()
        self._num_trusting = 0
        #: By id: a tensor, and the layers whose outputs it follows from.
        self._followers: dict[int, tuple[Tensor, _Columns]] = {}
        self._inputs: list[Any] = []
        #: Nodes that use such numbers, with their layers, and whether only an input of the forward makes them do so.
        self._uses: dict[fx.Node, tuple[_Columns, bool]] = {}
        self._used: _Columns = frozenset()
        self._dropouts: list[tuple[nn.Module | None, _Columns]] = []

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._root = root
        with WatchedFunctions(self._function):
            return super().trace(root, concrete_args)

    def reading(self) -> TracedSegment:
        """Return the segment that the trace shows."""
        if not self._inputs:
            raise NotProven(f"the forward of {type(self._root).__name__} does not call it")
        reached = []
        for x in self._inputs:
            if isinstance(x, fx.Proxy):
                self._refuse_symbolic(x.node)
            reached.append(self._columns_of(x))
        columns = reached[0]
        if any(other != columns for other in reached):
            raise NotProven("it is called with outputs of different layers")
        if not columns:
            raise NotProven("what lies between is not proven element-wise: no function of torch computes it")
        for node, (used, _) in self._uses.items():
            if used & columns:
                raise NotProven(f"what is computed from their outputs is also used by {self._described(node)}")
        layers = {*columns, self._stimulus.row}
        for node in self.graph.nodes:
            holder, _, _ = str(node.target).rpartition(".")
            if node.op == "get_attr" and node.users and self._root.get_submodule(holder) in layers:
                raise NotProven(f"the forward uses {node.target} itself")
        between = dict.fromkeys(dropout for dropout, used in self._dropouts if used & columns)
        elsewhere = {None, *(dropout for dropout, used in self._dropouts if not used & columns)}
        return TracedSegment(
            {layer: len(rows) for layer, rows in self._stimulus.columns.items() if layer in columns},
            tuple(dropout for dropout in between if dropout is not None and dropout not in elsewhere),
            not elsewhere.isdisjoint(between),
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        m, columns = base_of(m), self._columns_in((args, kwargs))
        if m in self._stimulus.columns and not columns:
            return self._following(self._stimulus.output_of(m), frozenset((m,)))
        if m is self._stimulus.row:
            self._row_called(*args, *kwargs.values())
            return self.create_proxy("call_module", self.path_of_module(m), (), {})
        if is_elementwise_module(m) and why_changed(m) is None:
            if isinstance(m, nn.Dropout | nn.AlphaDropout | UnitDropout):
                self._dropouts.append((None if isinstance(m, nn.AlphaDropout) else m, columns))
                if columns:
                    return args[0]
            elif columns:
                with self._trusting():
                    return self._following(forward(*args, **kwargs), columns)
        if columns and type(m) is nn.GLU and why_changed(m) is None:
            return m.forward(*args)
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            if columns := self._columns_of(a):
                self._used |= columns
            else:
                self._stimulus.elsewhere.append(a)
            return None  # else it would become an attribute of the module
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if self._used:
            self._uses[node] = self._used, False
            self._used = frozenset()
        return node

    def _row_called(self, x: Any) -> None:
        if not self._stimulus.is_in_backward:  # where activation checkpointing computes again
            self._inputs.append(x)
        if isinstance(x, Tensor):
            with self._trusting():
                self._stimulus.record(x)

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch that the forward calls."""
        name = name_of_function(function)
        columns = self._columns_in((args, kwargs))
        if name.strip("_").endswith("dropout") and isinstance(args[0], Tensor):
            self._dropouts.append((None, columns))
            return args[0]
        # Activation checkpointing computes the forward again, within the backward that the trusted record makes.
        is_trusting = self._num_trusting > int(self._stimulus.is_in_backward)
        if is_trusting or not columns:
            return function(*args, **kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}))
        if name in _METADATA:
            return self.create_proxy("call_function", getattr, (None, name), {})
        others = [value for value in leaves_of((args, kwargs)) if isinstance(value, fx.Proxy)]
        if name in ("to", "type_as") and others and isinstance(args[0], Tensor):
            return args[0]
        is_known = is_elementwise_function(name) or name in _OF_BLOCKS
        if not is_known or others or "out" in kwargs:
            proxy = self.create_proxy("call_function", function, args, kwargs)
            self._uses[proxy.node] = columns, is_known and any(other.node.op != "get_attr" for other in others)
            return proxy
        return self._following(function(*args, **kwargs), columns)

    def _following(self, result: Any, columns: _Columns) -> Any:
        for tensor in leaves_of(result):
            if isinstance(tensor, Tensor):
                self._followers[id(tensor)] = tensor, columns
        return result

    def _columns_of(self, value: Any) -> _Columns:
        return self._followers[id(value)][1] if id(value) in self._followers else frozenset()

    def _columns_in(self, values: Any) -> _Columns:
        return frozenset().union(*map(self._columns_of, leaves_of(values)))

    def _refuse_symbolic(self, node: fx.Node) -> None:
        """Tell why what the row-parallel layer reads is not computed with numbers."""
        seen, todo = {node}, [node]
        for each in todo:
            if each in self._uses and not self._uses[each][1]:
                raise NotProven(f"what lies between is not proven element-wise: {self._described(each)}")
            todo += [other for other in each.all_input_nodes if other not in seen]
            seen.update(each.all_input_nodes)
        raise FromOutside("its input is no output of a column-parallel layer")

    def _described(self, node: fx.Node) -> str:
        if node.op == "output":
            return "the module's caller"
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            changed = why_changed(module) if is_elementwise_module(module) else None
            return f"{node.target} ({type(module).__name__})" if changed is None else f"{node.target} {changed}"
        others = ", ".join(
            str(other.target) for other in node.all_input_nodes if other.op in ("placeholder", "get_attr")
        )
        return f"{name_of_function(node.target)}()" + (f" with {others}" if others else "")

    @contextmanager
    def _trusting(self) -> Iterator[None]:
        """Look at no function while the block lasts."""
        self._num_trusting += 1
        try:
            yield
        finally:
            self._num_trusting -= 1


def _under_every_circumstance(module: nn.Module, trace: Callable[[dict[str, Any] | None], object]) -> None:
    """Call ``trace``, which is given arguments for the forward of ``module``, as often as that may differ."""
    if "forward" in vars(module):  # fx would trace that of its class
        raise TypeError("its forward was replaced")
    kind = next((parameter.device.type for parameter in module.parameters() if not parameter.is_meta), "cpu")
    flags = {part.training for part in module.modules()}
    modes = (True, False) if len(flags) == 1 else (True, False, None)
    with own_hooks_off(module), nothing_kept(module):
        for arguments, training, autocast in itertools.product(arguments_of(module), modes, (False, True)):
            gradients = torch.set_grad_enabled(training is not False)
            with in_mode(module, training), gradients, torch.autocast(kind, enabled=autocast):
                trace(arguments)


def arguments_of(module: nn.Module) -> list[dict[str, Any] | None]:
    """Return what a forward may be called with: everything, only what it needs, and each flag the other way."""
    parameters = inspect.signature(module.forward).parameters.items()
    optional = {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}
    if not optional:
        return [None]
    flags = [name for name, default in optional.items() if isinstance(default, bool)]
    return [None, optional, *({**optional, name: not optional[name]} for name in flags)]


def _line_of(error: Exception) -> str:
    """The kind and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


@dataclass(frozen=True)
class TracedAgain:
    """Traces the module that holds a segment as ``convert`` did; called, it tells what is not as it was."""

    model: nn.Module
    holder: nn.Module
    name: str
    row: Any
    reading: TracedSegment

    def __call__(self) -> str | None:
        described = f"{self.name or 'the model'} ({type(self.holder).__name__}) was changed after convert"
        if reached_around(self.holder, (*self.reading.columns, self.row), self.model):
            return f"{described}: it, or a layer in it, is now elsewhere in the model"
        try:
            now = traced_segment(self.holder, self.name, self.row)
        except NotProven as error:
            return f"it was changed after convert: {error}"
        if now.columns != self.reading.columns:
            return f"{described}: other layers come before"
        if len(now.dropouts) > len(self.reading.dropouts) or now.has_other_dropout > self.reading.has_other_dropout:
            return f"{described}: it has dropout that it did not have"
        return None


def reached_around(holder: nn.Module, layers: Sequence[Any], model: nn.Module) -> list[Any]:
    """Return which of the layers in ``holder`` the model also reaches on a way that does not pass it."""
    seen: set[nn.Module] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += [] if module is holder else module.children()
    return [layer for layer in layers if holder not in seen or layer in seen]
