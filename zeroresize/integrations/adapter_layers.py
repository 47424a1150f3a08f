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


def why_replaced(model: nn.Module, name: str, layer: nn.Module) -> str | None:
    """Tell what is now in a model instead of the layer that was called ``name``; None if it is still there."""
    now: object = model
    for part in name.split("."):
        now = getattr(now, part, None)
    if now is layer:
        return None
    kind = type(now)
    if isinstance(now, nn.Module) and _is_adapter_layer(now):
        return (
            f"was put into a {kind.__module__}.{kind.__name__} after convert, whose matrices of the layer's units "
            "would stay behind"
        )
    return "is not in the model any more" if now is None else f"was replaced after convert by a {kind.__name__}"


def _is_adapter_layer(module: nn.Module) -> bool:
    return any(kind.__module__ == _FILE and kind.__name__ == _CLASS for kind in type(module).__mro__)
