"""Whether the attention that a module of Hugging Face's transformers computes is one that treats heads alike.

Its class says little: the function is looked up by the configuration's ``_attn_implementation`` at every forward, in a
table to which anybody can add, or in which anybody can replace what is there. A function of a user may hold something
for every head of this rank, such as ALiBi's slopes.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

#: Name of an implementation → the module of transformers and the function in it that computes it.
_KNOWN = {
    "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    "flash_attention_2": ("transformers.integrations.flash_attention", "flash_attention_forward"),
    "flash_attention_3": ("transformers.integrations.flash_attention", "flash_attention_forward"),
}
#: Whose functions a forward may call: these are read, or know nothing of single heads.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "colossalai", "flash_attn"} - {"__main__"}
#: Functions that others put in place of those of transformers, and that treat heads alike.
_READ = {("liger_kernel.transformers.rope", "liger_rotary_pos_emb")}
#: From this version on, torch's attention is known to compute with no heads: older ones crashed on empty tensors.
_SDPA_OF_NO_HEADS = (2, 13)
_EAGER = "eager_attention_forward"
_TABLE = "ALL_ATTENTION_FUNCTIONS"


def why_unknown_attention(module: Any) -> str | None:
    """Tell why an attention module may compute what depends on which heads it holds; None if it cannot.

    Args:
        module: one whose class is known, with the class's own forward.
    """
    modeling = sys.modules[type(module).__module__]
    table = vars(modeling).get(_TABLE)
    if table is None:  # the class computes attention itself
        return why_foreign(module)
    # Every implementation falls back to the eager one, where weights are to be returned.
    if not _is_of(vars(modeling).get(_EAGER), modeling.__name__, _EAGER):
        return f"{_EAGER} of {modeling.__name__} was replaced"
    name = module.config._attn_implementation
    if name == "eager":
        return why_foreign(module)
    if name not in _KNOWN:
        return (
            f"the attention function {name!r} is not known to treat heads alike: known are "
            f"{', '.join(map(repr, ('eager', *_KNOWN)))}"
        )
    if name not in table or not _is_of(table[name], *_KNOWN[name]):
        return f"the attention function {name!r} is not that of transformers: another was registered by this name"
    return why_foreign(module, table[name])


def why_foreign(module: Any, *others: Any) -> str | None:
    """Tell why the forward of a module calls what is no library's, by the names in its code; None if it does not.

    Functions of transformers that it calls are looked into, those of other libraries are not.

    Args:
        others: functions that the forward finds in another way.
    """
    forward = module.forward
    seen: set[types.CodeType] = set()
    todo: list[tuple[str, Any]] = [("forward", getattr(forward, "__func__", forward))]
    todo += [("attention", one) for one in others]
    while todo:
        name, function = todo.pop()
        library, function = _home_of(function)
        place_of_function = (function.__globals__.get("__name__"), function.__code__.co_name)
        if library not in _LIBRARIES and place_of_function not in _READ:
            module_name, function_name = place_of_function
            return (
                f"{name} is not a library's: {function_name} of {module_name} is called by the forward of "
                f"{type(module).__name__}"
            )
        if function.__code__ not in seen and (library == "transformers" or name == "forward"):
            seen.add(function.__code__)
            todo += _called_by(function, type(module))
    return None


def _called_by(function: types.FunctionType, kind: type) -> Iterator[tuple[str, Any]]:
    """Functions written in Python that its code may call: of its file, of modules named there, and of its class."""
    names = function.__code__.co_names
    places: list[tuple[str, Any]] = [
        ("", function.__globals__.get),
        (f"{kind.__name__}.", lambda name: getattr(kind, name, None)),
    ]
    modules = [one for name in names if isinstance(one := function.__globals__.get(name), types.ModuleType)]
    modules += [
        inner for module in modules for name in names if isinstance(inner := vars(module).get(name), types.ModuleType)
    ]
    places += [(f"{one.__name__}.", vars(one).get) for one in (*modules, torch.nn.functional)]
    for prefix, place in places:
        for name in names:
            if inspect.isfunction(function_there := place(name)):
                yield f"{prefix}{name}", function_there


def _home_of(function: Any) -> tuple[str, Any]:
    """The library whose file a function is defined in, and the function within decorators of libraries."""
    while True:
        library = str(function.__globals__.get("__name__")).partition(".")[0]
        within = getattr(function, "__wrapped__", None)
        if library not in _LIBRARIES or not inspect.isfunction(within):
            return library, function
        function = within


def fewest_heads(module: Any) -> int:
    """Return how many heads an attention module needs on every rank: flash attention divides by their number."""
    forward = module.forward
    names = {*getattr(forward, "__func__", forward).__code__.co_names}
    if "ColoAttention" in names:
        return 1
    implementation = module.config._attn_implementation if _TABLE in names else None
    if implementation == "eager" or (implementation is None and "scaled_dot_product_attention" not in names):
        return 0
    if implementation in (None, "sdpa"):
        return 0 if tuple(map(int, torch.__version__.split(".")[:2])) >= _SDPA_OF_NO_HEADS else 1
    return 1


def is_forward_of_class(module: Any) -> bool:
    """Tell whether a class has the forward that its file defines, decorated by its library at most."""
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
