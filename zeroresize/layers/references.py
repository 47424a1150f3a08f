"""Parameters that a layer can read without having registered them: by a list, a closure, a partial, a bound method."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from zeroresize.utils.torch_private import base_of

#: What ``torch.nn.Module`` keeps of its own: what is registered, and hooks, which often watch whole models.
_OF_TORCH = frozenset(vars(nn.Module()))
_MOST_OBJECTS = 20_000


def read_parameters(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that ``layer`` has registered and those that its objects refer to, by where they are.

    A module that holds the layer itself, as a parent or a monitor's model does, is not what it computes with.
    """
    yield from layer.named_parameters()
    seen = set(map(id, layer.modules()))
    todo = [
        (f"{name}.{key}".lstrip("."), value)
        for name, module in layer.named_modules()
        for key, value in _outside(module)
    ]
    while todo and len(seen) < _MOST_OBJECTS:
        name, value = todo.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | types.ModuleType | None):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if all(module is not layer for module in value.modules()):
                yield from ((f"{name} (by reference)", parameter) for parameter in value.parameters())
        elif isinstance(value, Tensor):
            yield f"{name} (by reference)", base_of(value)
        else:
            todo += [(name, referred) for referred in _inside(value)]


def _outside(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds besides what it has registered, and the functions of its class, by name."""
    yield from ((key, value) for key, value in vars(module).items() if key not in _OF_TORCH)
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            yield from ((key, value) for key, value in vars(kind).items() if not isinstance(value, type))


def _inside(value: Any) -> list[Any]:
    """What a container, a function or an object refers to."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, property | staticmethod | classmethod):
        return [value.fget] if isinstance(value, property) else [value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*cells, *(value.__defaults__ or ()), *(one for one in named if isinstance(one, nn.Module | Tensor))]
    is_plain = type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins", "weakref", "threading")
    return [] if is_plain else list(getattr(value, "__dict__", {}).values())
