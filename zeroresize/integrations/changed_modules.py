"""Whether a module computes what its class says: who has replaced its forward, or put hooks on it.

A hook may change what a module returns, or a gradient, in a way that depends on which units lie on this rank, so that
units do not move where there is one, unless it is this package's or known to only watch.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from zeroresize.integrations.known_modules import is_registered_function
from zeroresize.utils.torch_private import hooks_of, hooks_of_all_modules, hooks_of_parameter, parameters_of, set_hooks

#: A kind of hooks of a module → what a hook in it does.
_OF_MODULES = {
    "forward": "a forward hook, which may change what it returns",
    "forward_pre": "a forward pre-hook, which may change what it reads",
    "backward": "a backward hook, which may change its gradients",
    "backward_pre": "a backward pre-hook, which may change its gradients",
}
#: The same of a parameter. Hooks of its gradient accumulator are called once all is summed, and cannot be listed.
_OF_PARAMETERS = {
    "backward": "a hook, which may change its gradient",
    "post_accumulate_grad": "a post-accumulate hook, which may change its gradient",
}
#: Their hooks on modules change nothing that is computed.
_WATCHING = ("zeroresize.", "torch.utils.")
#: Their hooks on parameters treat elements alike: they reduce over replicas, or count.
_REDUCING = (
    *("zeroresize.", "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._"),
    *("colossalai.", "transformers.distributed.", "deepspeed.runtime.zero.stage_1_and_2"),
)
#: Their hooks average over all ranks, which leaves gradients of what all hold alike as they are, and spoils parts.
_AVERAGING = ("transformers.trainer",)
#: Their hooks on parameters fill buffers that hold the gradients of many parameters, in a layout of their own.
_BUFFERING = ("megatron.core.distributed.", "deepspeed.runtime.")


def why_changed(module: nn.Module, *, is_whole: bool = False) -> str | None:
    """Tell why a module may return something else than its class computes; None if it does not."""
    return "has another forward than its class" if "forward" in vars(module) else why_hooked(module, is_whole=is_whole)


def why_hooked(module: nn.Module, *, is_whole: bool = False) -> str | None:
    """Tell why a module or its parameters may give something else than its forward does; None if they do not.

    Args:
        is_whole: whether all ranks hold the same of it.
    """
    for kind, effect in _OF_MODULES.items():
        for hook in _foreign(hooks_of(module, kind), _WATCHING):
            return f"has {effect}: {_name_of(hook)}"
        for hook in _foreign(hooks_of_all_modules(kind), _WATCHING):
            return f"has, as all modules have, {effect}: {_name_of(hook)}"
    for name, parameter in parameters_of(module).items():
        for kind, effect in _OF_PARAMETERS.items():
            for hook in _foreign(hooks_of_parameter(parameter, kind), _REDUCING + _AVERAGING * is_whole):
                if _name_of(hook).startswith(_BUFFERING):
                    return f"has a {name} whose gradients {_name_of(hook)} puts into a buffer, which would not follow"
                return (
                    f"has a {name} with {effect}: {_name_of(hook)} (if it treats every element by itself, tell by "
                    "zeroresize.integrations.register_elementwise)"
                )
    return None


@contextmanager
def own_hooks_off(module: nn.Module) -> Iterator[None]:
    """Leave hooks of this package in ``module``, such as clocks, uncalled while the block lasts."""
    before = [(part, kind, hooks_of(part, kind)) for part in module.modules() for kind in ("forward", "forward_pre")]
    before = [entry for entry in before if entry[2]]
    try:
        for part, kind, hooks in before:
            foreign = set(map(id, _foreign(hooks, ("zeroresize.",))))
            kept = {key: hook for key, hook in hooks.items() if id(_unwrapped(hook)) in foreign}
            set_hooks(part, kind, OrderedDict(kept))
        yield
    finally:
        for part, kind, hooks in before:
            set_hooks(part, kind, hooks)


def remembered_by(function: Any) -> dict[str, Any]:
    """Return what a function has taken from where it was defined, by name; nothing of what is no function."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _foreign(hooks: Mapping[Any, Any], known: tuple[str, ...]) -> Iterator[Any]:
    for function in map(_unwrapped, hooks.values()):
        if not is_registered_function(function) and not str(getattr(function, "__module__", None)).startswith(known):
            yield function


def _unwrapped(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
