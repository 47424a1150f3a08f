"""Whether the attention that a module of Hugging Face's transformers computes is one that treats heads alike.

Its class says little: the function is looked up by the configuration's ``_attn_implementation`` at every forward, in a
table to which anybody can add, or in which anybody can replace what is there. A function of a user may hold something
for every head of this rank, such as ALiBi's slopes.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

#: Name of an implementation → the module of transformers and the function in it that computes it.
_KNOWN = {
    "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    "flash_attention_2": ("transformers.integrations.flash_attention", "flash_attention_forward"),
    "flash_attention_3": ("transformers.integrations.flash_attention", "flash_attention_forward"),
}
_EAGER = "eager_attention_forward"
_TABLE = "ALL_ATTENTION_FUNCTIONS"


def why_unknown_attention(module: Any) -> str | None:
    """Why an attention module may compute something that depends on which heads it holds; None if it cannot.

    Args:
        module: one whose class is known, with the class's own forward.
    """
    modeling = sys.modules[type(module).__module__]
    table = vars(modeling).get(_TABLE)
    if table is None:  # the class computes attention itself
        return None
    # Every implementation falls back to the eager one, where weights are to be returned.
    if not _is_of(vars(modeling).get(_EAGER), modeling.__name__, _EAGER):
        return f"{_EAGER} of {modeling.__name__} was replaced"
    name = module.config._attn_implementation
    if name == "eager":
        return None
    if name not in _KNOWN:
        return (
            f"the attention function {name!r} is not known to treat heads alike: known are "
            f"{', '.join(map(repr, ('eager', *_KNOWN)))}"
        )
    if name not in table or not _is_of(table[name], *_KNOWN[name]):
        return f"the attention function {name!r} is not that of transformers: another was registered by this name"
    return None


def is_forward_of_class(module: Any) -> bool:
    """Whether the forward of a module's class is the one that its file defines, decorated by its library at most."""
    kind = type(module)
    return _is_of(kind.forward, kind.__module__, "forward")


def _is_of(function: Any, module_name: str, name: str) -> bool:
    """Whether a module defines this function, by what cannot be copied from another one as its name can."""
    library = module_name.partition(".")[0]
    while hasattr(function, "__wrapped__"):
        if str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] != library:
            return False
        function = function.__wrapped__
    home = sys.modules.get(module_name)
    if home is None or not inspect.isfunction(function):
        return False
    return function.__globals__ is vars(home) and function.__code__.co_name == name
