"""Traces a module's forward with ``torch.fx`` as often as it may compute something else.

That is in training and evaluation, with and without autocast, and with optional arguments given or not; a flag is
given either way. A forward must keep nothing meanwhile, and draw no random numbers.
"""

from __future__ import annotations

import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import fx, nn

from zeroresize.integrations.changed_modules import own_hooks_off
from zeroresize.integrations.elementwise import is_elementwise_module
from zeroresize.integrations.module_state import nothing_kept
from zeroresize.layers.balanced_linear import BalancedLinear

_TRACING = ("torch", "zeroresize", "contextlib")
_TracerT = TypeVar("_TracerT", bound=fx.Tracer)


class ForwardTracer(fx.Tracer):
    """Enters containers and modules of the user, not torch's own and parallel layers.

    Args:
        holding: if given, of the user's modules only those are entered that hold this layer.
    """

    proxy_buffer_attributes = True

    def __init__(self, holding: nn.Module | None) -> None:
        leaves: Any = [sys.modules[name] for name in ("math", "einops") if name in sys.modules]
        super().__init__(autowrap_modules=leaves)
        self._holding = holding

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BalancedLinear) or is_elementwise_module(m):
            return True
        if self._holding is not None and all(self._holding is not module for module in m.modules()):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def forward_traces(
    module: nn.Module, make_tracer: Callable[[], _TracerT], *, with_autocast: bool = True
) -> Iterator[_TracerT]:
    """Trace the forward of ``module`` under every circumstance, and yield the tracer, which has its graph, of each.

    Raises:
        Exception: whatever the forward raises, and TypeError where it keeps something or draws random numbers.
    """
    if "forward" in vars(module):  # fx would trace that of its class
        raise TypeError("its forward was replaced")
    kind = next((parameter.device.type for parameter in module.parameters() if not parameter.is_meta), "cpu")
    flags = {part.training for part in module.modules()}
    with own_hooks_off(module), nothing_kept(module):
        for arguments in _arguments_of(module):
            for training in (True, False) if len(flags) == 1 else (True, False, None):
                for autocast in (False, True) if with_autocast else (False,):
                    tracer = make_tracer()
                    gradients = torch.set_grad_enabled(training is not False)
                    with _in_mode(module, training), gradients, torch.autocast(kind, enabled=autocast):
                        tracer.trace(module, concrete_args=arguments)
                    yield tracer


def graphs_as_far_as_traced(module: nn.Module, holding: nn.Module | None) -> Iterator[fx.Graph]:
    """Trace the forward of ``module`` as it is called with all arguments and without optional ones.

    Where it cannot be traced, the graph ends there.

    Args:
        holding: as of :class:`ForwardTracer`.
    """
    if "forward" in vars(module):
        return
    for arguments in _arguments_of(module)[:2]:
        tracer = _PersistentTracer(holding)
        with suppress(Exception), own_hooks_off(module), nothing_kept(module):
            tracer.trace(module, concrete_args=arguments)
        if (graph := getattr(tracer, "graph", None)) is not None:
            yield graph


def place_of(error: BaseException) -> str:
    """Tell where in a user's code ``error`` was raised, for the end of a message; empty if nowhere."""
    places = [
        f" (in {frame.f_code.co_name}, {frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _TRACING
    ]
    return places[-1] if places else ""


class _PersistentTracer(ForwardTracer):
    """Goes on where a forward loops over chunks, or over the two dimensions before the features."""

    def iter(self, obj: Any) -> Iterator[Any]:
        node, num_items = obj.node, 0
        if getattr(node.target, "__name__", node.target) == "chunk":
            num_items = node.kwargs.get("chunks", (*node.args, 0)[1])
        elif node.target is operator.getitem and isinstance(node.args[1], slice):
            num_items = 2
        return iter([obj[number] for number in range(num_items)]) if num_items else super().iter(obj)


def _arguments_of(module: nn.Module) -> list[dict[str, Any] | None]:
    """What a forward may be called with: everything, only what it needs, and each flag the other way."""
    parameters = inspect.signature(module.forward).parameters.items()
    optional = {name: one.default for name, one in parameters if one.default is not inspect.Parameter.empty}
    if not optional:
        return [None]
    flags = [name for name, default in optional.items() if isinstance(default, bool)]
    return [None, optional, *({**optional, name: not optional[name]} for name in flags)]


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
