"""Layers of PEFT, such as LoRA's, around layers that can be balanced: their matrices do not move with units."""

from __future__ import annotations

from torch import nn

_FILE, _CLASS = "peft.tuners.tuners_utils", "BaseTunerLayer"


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
    return any(kind.__module__ == _FILE and kind.__name__ == _CLASS for kind in type(module).__mro__)
