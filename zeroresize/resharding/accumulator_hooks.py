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

#: Returns an ordered dictionary of hooks, which torch keeps; None once it is gone.
Source = Callable[[], Any]
#: The present node of a parameter, by the ``id`` of the hooks on its first one, for as long as these live.
_present: dict[int, list[Any]] = {}


class KeptHooks:
    """Keeps the hooks on the gradient accumulator that ``parameter`` has now, for the one that it gets.

    They are called as long as somebody holds on to the node that they were put on; handles of them stay good.
    """

    def __init__(self, parameter: Tensor) -> None:
        node = _accumulator(parameter)
        self._sources = [] if node is None else [(is_before, _sources(node, is_before)) for is_before in (True, False)]

    def put_on(self, parameter: Tensor) -> None:
        """Let the accumulator that ``parameter`` has now call the kept hooks."""
        for is_before, sources in self._sources:
            first = sources[0]() if sources else None
            if first is None:
                continue
            node = _accumulator(parameter)
            _register(node, is_before, _Calling(sources, is_before))
            if id(first) not in _present:
                weakref.finalize(first, _present.pop, id(first), None).atexit = False
            _present[id(first)] = [node]


class _Calling:
    """A hook that calls those of other nodes, in the order of ``sources``; before accumulation they may change it."""

    def __init__(self, sources: list[Source], is_before: bool) -> None:
        self.sources, self._is_before = sources, is_before

    def __call__(self, gradients: Any, *outputs: Any) -> Any:
        for hook in [hook for source in self.sources for hook in _hooks_of_others(source() or {})]:
            changed = hook(gradients, *outputs)
            if self._is_before and changed is not None:
                gradients = changed if isinstance(changed, tuple) else (changed,)
        return gradients if self._is_before else None


def _accumulator(parameter: Tensor) -> Any:
    """None where no gradients are accumulated."""
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    return None if view.grad_fn is None else view.grad_fn.next_functions[0][0]


def _register(node: Any, is_before: bool, hook: Any) -> Any:
    return node.register_prehook(hook) if is_before else node.register_hook(hook)


def _sources(node: Any, is_before: bool) -> list[Source]:
    """Where the hooks of a node come from: first what somebody else holds on to, then what is only here."""
    handle = _register(node, is_before, lambda *_: None)  # the only way to the hooks that are there
    hooks = handle.hooks_dict_ref()
    handle.remove()
    kept = [source for hook in hooks.values() if isinstance(hook, _Calling) for source in hook.sources]
    if not kept:
        return [weakref.ref(hooks)] if hooks else []
    return [*kept, lambda: hooks] if _hooks_of_others(hooks) else kept


def _hooks_of_others(hooks: Any) -> list[Any]:
    return [hook for hook in list(hooks.values()) if not isinstance(hook, _Calling)]
