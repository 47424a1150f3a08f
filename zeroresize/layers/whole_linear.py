"""Which ``nn.Linear`` layers compute nothing but x Aᵀ + b, so that another class may compute it for them."""

from __future__ import annotations

from typing import Any

from torch import nn

#: What a subclass of ``nn.Linear`` may have and still compute the same as an ``nn.Linear``, once it is made.
_LOSES_NOTHING = {
    *("__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate_func__", "__parameters__"),
    *("__constants__", "__firstlineno__", "__static_attributes__"),
}


def why_no_plain_linear(module: Any, *, but_for_forward: bool = False) -> str | None:
    """Tell why a linear layer may compute something else than its weight and bias say; None if it does not.

    Args:
        but_for_forward: whether a forward in place of the class's is known already.
    """
    kind = type(module)
    if kind.forward is not nn.Linear.forward or ("forward" in vars(module) and not but_for_forward):
        return f"a {kind.__name__} with a forward of its own"
    classes = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    lost = sorted({added for each in classes for added in vars(each)} - _LOSES_NOTHING)
    if lost:
        return f"a {kind.__name__}: its {', '.join(lost)} would be lost"
    named = (*module.named_parameters(), *module.named_buffers(), *module.named_children())
    others = {part for part, _ in named} - {"weight", "bias"}
    return f"one that holds {', '.join(sorted(others))} beside its weight and bias" if others else None
