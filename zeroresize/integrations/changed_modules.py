"""Whether a module computes what its class says: who has replaced its forward, or hooked into it or its gradients.

A hook may change what a module returns, or a gradient, in a way that depends on which units lie on this rank. What it
does cannot be seen, so that units do not move where there is one, unless it is this package's or known to only watch.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as modules_of_torch

from zeroresize.integrations.elementwise import is_registered_function

#: A module's dictionary of hooks → what a hook in it does.
_OF_MODULES = {
    "_forward_hooks": "a forward hook, which may change what it returns",
    "_forward_pre_hooks": "a forward pre-hook, which may change what it reads",
    "_backward_hooks": "a backward hook, which may change its gradients",
    "_backward_pre_hooks": "a backward pre-hook, which may change its gradients",
}
_OF_FORWARDS = ("_forward_hooks", "_forward_pre_hooks")
#: The same of a parameter. Hooks of its gradient accumulator are called once all is summed, and cannot be listed.
_OF_PARAMETERS = {
    "_backward_hooks": "a hook, which may change its gradient",
    "_post_accumulate_grad_hooks": "a post-accumulate hook, which may change its gradient",
}
#: Their hooks on modules change nothing that is computed.
_WATCHING = ("zeroresize.", "torch.utils.")
#: Their hooks on parameters treat elements alike: they reduce over replicas, or count.
_REDUCING = ("zeroresize.", "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._", "colossalai.")


def why_changed(module: nn.Module) -> str | None:
    """Why a module may return something else than its class computes; None if it does not."""
    if "forward" in vars(module):
        return "has another forward than its class"
    return why_hooked(module)


def why_hooked(module: nn.Module) -> str | None:
    """Why a module or its parameters may give something else than its forward does; None if they do not."""
    for where, told in _OF_MODULES.items():
        for hook in _foreign(getattr(module, where), _WATCHING):
            return f"has {told}: {_name_of(hook)}"
        for hook in _foreign(getattr(modules_of_torch, f"_global{where}", None), _WATCHING):
            return f"has, as all modules have, {told}: {_name_of(hook)}"
    for name, parameter in module._parameters.items():
        for where, told in _OF_PARAMETERS.items():
            for hook in _foreign(getattr(parameter, where, None), _REDUCING):
                return (
                    f"has a {name} with {told}: {_name_of(hook)} (if it treats every element by itself, tell by "
                    "zeroresize.integrations.register_elementwise)"
                )
    return None


@contextmanager
def own_hooks_off(module: nn.Module) -> Iterator[None]:
    """While the block lasts, hooks of this package in ``module``, such as clocks, are not called."""
    before = [(one, where, getattr(one, where)) for one in module.modules() for where in _OF_FORWARDS]
    before = [(one, where, hooks) for one, where, hooks in before if any(map(_is_own, hooks.values()))]
    try:
        for one, where, hooks in before:
            setattr(one, where, OrderedDict((key, hook) for key, hook in hooks.items() if not _is_own(hook)))
        yield
    finally:
        for one, where, hooks in before:
            setattr(one, where, hooks)


def _is_own(hook: Any) -> bool:
    return not list(_foreign({0: hook}, ("zeroresize.",)))


def _foreign(hooks: Mapping[Any, Any] | None, known: tuple[str, ...]) -> Iterator[Any]:
    for hook in (hooks or {}).values():
        function = _unwrapped(hook)
        if is_registered_function(function) or str(getattr(function, "__module__", None)).startswith(known):
            continue
        yield function


def _unwrapped(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
