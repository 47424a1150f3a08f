"""Hooks on gradient accumulators, as overlapping reducers put them, stay when a parameter gets another shape.

A parameter's AccumulateGrad node remembers a shape, so another shape needs another node. Whoever has put hooks on the
old one (``p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)``) holds on to it, as the parameter does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Hooks = Any  # an ordered dictionary that torch keeps, weakly referable

#: The present node of a parameter, by the ``id`` of the hooks on its first one, for as long as these live.
_present: dict[int, list[Any]] = {}


class KeptHooks:
    """Keeps the hooks on the gradient accumulator that ``parameter`` has now, for the one that it gets.

    They are called as long as somebody holds on to the node that they were put on; handles of them stay good.
    """

    def __init__(self, parameter: Tensor) -> None:
        node = _accumulator(parameter)
        self._sources = {} if node is None else {kind: _sources(node, kind) for kind in (_Before, _After)}

    def put_on(self, parameter: Tensor) -> None:
        """Let the accumulator that ``parameter`` has now call the kept hooks."""
        for kind, sources in self._sources.items():
            first = sources[0]() if sources else None
            if first is None:
                continue
            node = _accumulator(parameter)
            kind.register(node, kind(sources))
            if id(first) not in _present:
                weakref.finalize(first, _present.pop, id(first), None).atexit = False
            _present[id(first)] = [node]


class _Calling:
    """A hook that calls those of other nodes.

    Args:
        sources: return hooks, in the order in which they are called; None once they are gone.
    """

    register: Callable[[Any, Any], Any]

    def __init__(self, sources: list[Callable[[], Hooks | None]]) -> None:
        self.sources = sources

    def _hooks(self) -> list[Any]:
        hooks_of_nodes = [source() for source in self.sources]
        return [hook for hooks in hooks_of_nodes if hooks is not None for hook in _hooks_of_others(hooks)]


class _Before(_Calling):
    """Of ``register_prehook``: hooks may give another gradient."""

    @staticmethod
    def register(node: Any, hook: Any) -> Any:
        return node.register_prehook(hook)

    def __call__(self, gradients: Any) -> Any:
        for hook in self._hooks():
            changed = hook(gradients)
            gradients = gradients if changed is None else changed if isinstance(changed, tuple) else (changed,)
        return gradients


class _After(_Calling):
    """Of ``register_hook``: there are no inputs' gradients that hooks could change."""

    @staticmethod
    def register(node: Any, hook: Any) -> Any:
        return node.register_hook(hook)

    def __call__(self, inputs: Any, outputs: Any) -> None:
        for hook in self._hooks():
            hook(inputs, outputs)


def _accumulator(parameter: Tensor) -> Any:
    """None where no gradients are accumulated."""
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    return None if view.grad_fn is None else view.grad_fn.next_functions[0][0]


def _sources(node: Any, kind: type[_Calling]) -> list[Callable[[], Hooks | None]]:
    """Where the hooks of a node come from: first what somebody else holds on to, then what is only here."""
    handle = kind.register(node, _nothing)  # the only way to the hooks that are there
    hooks = handle.hooks_dict_ref()
    handle.remove()
    kept = [source for hook in hooks.values() if isinstance(hook, kind) for source in hook.sources]
    if not kept:
        return [weakref.ref(hooks)] if hooks else []
    return [*kept, lambda: hooks] if _hooks_of_others(hooks) else kept


def _hooks_of_others(hooks: Hooks) -> list[Any]:
    return [hook for hook in list(hooks.values()) if not isinstance(hook, _Calling)]


def _nothing(*_: Any) -> None:
    pass
