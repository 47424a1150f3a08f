"""The graphs of a module's forward, traced with ``torch.fx`` under everything that it may ask for.

A graph is what the forward did once. So it is traced in training and evaluation, with and without gradients and
autocast, and with and without optional arguments, each time several times, and must keep no state and draw no random
numbers.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import operator
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn

from zeroresize.integrations.changed_modules import own_hooks_off
from zeroresize.integrations.elementwise import is_elementwise_module
from zeroresize.integrations.held_objects import library_of
from zeroresize.integrations.hidden_state import nothing_kept
from zeroresize.integrations.unseen_questions import compares_arguments, unseen_question
from zeroresize.layers.balanced_linear import BalancedLinear

_OF_AUTOGRAD = ("grad", "grad_fn")
#: What an argument may be that is compared by ``is``.
_SINGLE_VALUES = (True, False, None, "")
_KNOWING_PROXIES = ("torch", "zeroresize")


def forward_graphs(module: nn.Module, holding: nn.Module | None, num_times: int) -> Iterator[fx.Graph]:
    """Trace the forward of ``module`` under every circumstance, one graph for each.

    Args:
        module: is traced.
        holding: if given, of the user's modules only those are entered that hold this layer.
        num_times: how often it is traced under each circumstance.

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
    with _proxies_are_tensors(optional), own_hooks_off(module), nothing_kept(module) as watch:
        make_tracer = functools.partial(_Tracer, holding, watch.running)
        for arguments in for_arguments:
            yield from _under_modes(module, make_tracer, num_times, arguments)
        if (asked := unseen_question(watch.codes)) is not None:
            raise TypeError(asked)
        if compares_arguments(watch.codes):
            for name, value in itertools.product(optional, _SINGLE_VALUES):
                with suppress(AttributeError, ValueError):  # no value for this argument
                    yield from _under_modes(module, make_tracer, num_times, {**optional, name: value})


def graphs_as_far_as_traced(module: nn.Module, holding: nn.Module | None) -> Iterator[fx.Graph]:
    """Trace the forward of ``module`` as it is called with all arguments and without optional ones, each time once.

    Where it cannot be traced, the graph ends there.

    Args:
        holding: as of :func:`forward_graphs`.
    """
    if "forward" in vars(module):
        return
    parameters = inspect.signature(module.forward).parameters.items()
    optional = {name: one.default for name, one in parameters if one.default is not inspect.Parameter.empty}
    for arguments in (None, optional) if optional else (None,):
        tracer = None
        with suppress(Exception), _proxies_are_tensors(optional), own_hooks_off(module), nothing_kept(module) as watch:
            tracer = _PersistentTracer(holding, watch.running)
            tracer.trace(module, concrete_args=arguments)
        if (graph := getattr(tracer, "graph", None)) is not None:
            yield graph


def place_of(error: BaseException) -> str:
    """Tell where in a user's code ``error`` was raised, for the end of a message; empty if nowhere."""
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
    """Enters containers and modules of the user, not torch's own and parallel layers.

    Args:
        holding: if given, of the user's modules only those are entered that hold this layer.
        running: begins a block in which the forward runs.
    """

    def __init__(
        self,
        holding: nn.Module | None,
        running: Callable[[], AbstractContextManager[None]],
    ) -> None:
        leaves: Any = [sys.modules[name] for name in ("math", "einops") if name in sys.modules]
        super().__init__(autowrap_modules=leaves)
        self._holding = holding
        self._running = running

    def create_args_for_root(self, root_fn: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Return the function that fx traces, and its proxies; the function's run is watched."""
        forward, proxies = super().create_args_for_root(root_fn, *arguments, **options)

        @functools.wraps(forward)
        def watched(*inputs: Any) -> Any:
            with self._running():
                return forward(*inputs)

        return watched, proxies

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TensorProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BalancedLinear) or is_elementwise_module(m):
            return True
        if self._holding is not None and all(self._holding is not one for one in m.modules()):
            return True
        return super().is_leaf_module(m, module_qualified_name)


class _PersistentTracer(_Tracer):
    """Goes on where a forward loops over chunks, or over the two dimensions before the features."""

    def iter(self, obj: Any) -> Iterator[Any]:
        node, num_items = obj.node, 0
        if getattr(node.target, "__name__", node.target) == "chunk":
            num_items = node.kwargs.get("chunks", (*node.args, 0)[1])
        elif node.target is operator.getitem and isinstance(node.args[1], slice):
            num_items = 2
        return iter([obj[number] for number in range(num_items)]) if num_items else super().iter(obj)


def _under_modes(
    module: nn.Module, make_tracer: Callable[[], fx.Tracer], num_times: int, arguments: dict[str, Any] | None
) -> Iterator[fx.Graph]:
    flags = {one.training for one in module.modules()}
    for training in (True, False) if len(flags) == 1 else (True, False, None):
        for gradients, autocast in itertools.product((True, False), (False, True)):
            with _in_mode(module, training), torch.set_grad_enabled(gradients), _autocast(autocast):
                graphs = [make_tracer().trace(module, concrete_args=arguments) for _ in range(num_times)]
            if any(_operations(again) != _operations(graphs[0]) for again in graphs[1:]):
                raise TypeError("its forward does not compute the same every time")
            yield graphs[0]


def _operations(graph: fx.Graph) -> list[tuple[str, str, str, str]]:
    """Return what a graph computes, such that it can be compared."""
    return [(node.op, str(node.target), repr(node.args), repr(node.kwargs)) for node in graph.nodes]


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """Make autocast look on or off, on every device; nothing is computed meanwhile."""
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
    """Let every submodule's flag say ``training`` while the block lasts; None leaves what it says."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        for submodule, _ in before:
            submodule.training = submodule.training if training is None else training
        yield
    finally:
        for submodule, was in before:
            submodule.training = was
