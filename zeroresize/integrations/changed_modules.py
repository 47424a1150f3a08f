"""Whether a module computes what its class says: who has replaced its forward, or put hooks or an adapter on it.

A hook may change what a module returns, or a gradient, in a way that depends on which units lie on this rank. What it
does cannot be seen, so that units do not move where there is one, unless it is this package's or known to only watch.
Nor do they within a layer of PEFT, such as LoRA's: its matrices would stay behind.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroresize.integrations.elementwise import is_registered_function
from zeroresize.utils.torch_private import hooks_of, hooks_of_all_modules, hooks_of_parameter, parameters_of, set_hooks

#: A kind of hooks of a module → what a hook in it does.
_OF_MODULES = {
    "forward": "a forward hook, which may change what it returns",
    "forward_pre": "a forward pre-hook, which may change what it reads",
    "backward": "a backward hook, which may change its gradients",
    "backward_pre": "a backward pre-hook, which may change its gradients",
}
_OF_FORWARDS = ("forward", "forward_pre")
#: The same of a parameter. Hooks of its gradient accumulator are called once all is summed, and cannot be listed.
_OF_PARAMETERS = {
    "backward": "a hook, which may change its gradient",
    "post_accumulate_grad": "a post-accumulate hook, which may change its gradient",
}
_PEFT_FILE, _PEFT_CLASS = "peft.tuners.tuners_utils", "BaseTunerLayer"
#: Their hooks on modules change nothing that is computed.
_WATCHING = ("zeroresize.", "torch.utils.")
#: Their hooks on parameters treat elements alike: they reduce over replicas, or count.
_REDUCING = (
    *("zeroresize.", "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._"),
    *("colossalai.", "transformers.distributed."),
)


def why_changed(module: nn.Module) -> str | None:
    """Tell why a module may return something else than its class computes; None if it does not."""
    if "forward" in vars(module):
        return "has another forward than its class"
    return why_hooked(module)


def why_hooked(module: nn.Module) -> str | None:
    """Tell why a module or its parameters may give something else than its forward does; None if they do not."""
    for kind, effect in _OF_MODULES.items():
        for hook in _foreign(hooks_of(module, kind), _WATCHING):
            return f"has {effect}: {_name_of(hook)}"
        for hook in _foreign(hooks_of_all_modules(kind), _WATCHING):
            return f"has, as all modules have, {effect}: {_name_of(hook)}"
    for name, parameter in parameters_of(module).items():
        for kind, effect in _OF_PARAMETERS.items():
            for hook in _foreign(hooks_of_parameter(parameter, kind), _REDUCING):
                return (
                    f"has a {name} with {effect}: {_name_of(hook)} (if it treats every element by itself, tell by "
                    "zeroresize.integrations.register_elementwise)"
                )
    return None


@contextmanager
def own_hooks_off(module: nn.Module) -> Iterator[None]:
    """Leave hooks of this package in ``module``, such as clocks, uncalled while the block lasts."""
    before = [(part, kind, hooks_of(part, kind)) for part in module.modules() for kind in _OF_FORWARDS]
    before = [(part, kind, hooks) for part, kind, hooks in before if any(map(_is_own, hooks.values()))]
    try:
        for part, kind, hooks in before:
            set_hooks(part, kind, OrderedDict((key, hook) for key, hook in hooks.items() if not _is_own(hook)))
        yield
    finally:
        for part, kind, hooks in before:
            set_hooks(part, kind, hooks)


def _is_own(hook: Any) -> bool:
    return not list(_foreign({0: hook}, ("zeroresize.",)))


def _foreign(hooks: Mapping[Any, Any], known: tuple[str, ...]) -> Iterator[Any]:
    for hook in hooks.values():
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


def remembered_by(function: Any) -> dict[str, Any]:
    """Return what a function has taken from where it was defined, by name; nothing of what is no function."""
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


@dataclass(frozen=True)
class StillSound:
    """Looks for a segment's layers, and forwards and hooks in them, then asks on; called, it tells why units must stay.

    Attributes:
        model: that the layers were found in.
        layers: of the segment, by name.
        why_even: what an adapter, a user or a proof has to say beside it.
    """

    model: nn.Module
    layers: Mapping[str, Any]
    why_even: Callable[[], str | None] | None = None

    def __call__(self) -> str | None:
        for name, layer in self.layers.items():
            if (changed := why_adapted_since(self.model, name, layer) or why_changed(layer)) is not None:
                return f"{name} {changed}"
        return None if self.why_even is None else self.why_even()


def why_adapted(model: nn.Module, name: str) -> str | None:
    """Tell why the layer called ``name`` has no units that may move alone; None where no layer of PEFT is around it."""
    path = name.split(".")
    holder: nn.Module | None = model
    for length, part in enumerate(path):
        if holder is not None and _is_adapter_layer(holder):
            kind = type(holder)
            return (
                f"{'.'.join(path[:length]) or 'the model'} is a {kind.__module__}.{kind.__name__} around it, whose "
                "matrices of the layer's units would stay behind"
            )
        holder = getattr(holder, part, None)
    return None


def why_adapted_since(model: nn.Module, name: str, layer: nn.Module) -> str | None:
    """Tell which layer of PEFT was put around a layer after ``convert``; None if none was.

    Args:
        name: of the layer when it was converted; it may be elsewhere in the model since, as in a wrapper of a block.
    """
    there: object = model
    for part in name.split("."):
        there = getattr(there, part, None)
    if there is layer:
        return None
    for module in model.modules():
        if _is_adapter_layer(module) and any(inside is layer for inside in module.modules()):
            kind = type(module)
            return (
                f"was put into a {kind.__module__}.{kind.__name__} after convert, whose matrices of the layer's units "
                "would stay behind"
            )
    return None


def _is_adapter_layer(module: nn.Module) -> bool:
    return any(kind.__module__ == _PEFT_FILE and kind.__name__ == _PEFT_CLASS for kind in type(module).__mro__)
