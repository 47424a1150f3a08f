"""Layers that travel as a whole, from stage to stage or from strategy to strategy, need parameters of their own.

What they read without having registered it is found, too: by a list, a closure, a partial, a bound method.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from zeroresize.layers.balanced_linear import OF_A_BALANCER, BalancedLinear
from zeroresize.layers.weight_checks import is_wrapped_by_fsdp
from zeroresize.utils.torch_private import base_of

#: What ``torch.nn.Module`` keeps of its own: what is registered, and hooks, which often watch whole models.
_OF_TORCH = frozenset(vars(nn.Module()))
_MOST_OBJECTS = 20_000


def require_whole_parameters(layers: Sequence[nn.Module]) -> None:
    """Check that the layers' parameters are whole tensors of their own."""
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            if isinstance(module, DistributedDataParallel) or is_wrapped_by_fsdp(module):
                raise ValueError(
                    f"{path_of(number, path)} is inside {type(module).__name__}, which keeps buckets or shards of "
                    "these parameters, so layers cannot move: pass the layers themselves, and average gradients of "
                    "data-parallel replicas yourself"
                )
        for name, parameter in layer.named_parameters():
            is_plain = type(parameter.data) is Tensor and not isinstance(parameter, UninitializedParameter)
            if not (is_plain and parameter.is_leaf and parameter.layout is torch.strided):
                raise ValueError(
                    f"{path_of(number, name)} cannot move: it is no whole, initialized, strided tensor of its own "
                    f"(type {type(parameter.data).__name__})"
                )


def users_of_parameters(layers: Sequence[nn.Module]) -> dict[Tensor, list[tuple[int, str]]]:
    """Return the layers that have registered each parameter, by their numbers, with its name there."""
    users: dict[Tensor, list[tuple[int, str]]] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            users.setdefault(parameter, []).append((number, name))
    return users


def require_references_within_stages(layers: Sequence[nn.Module], stages: Sequence[int]) -> None:
    """Check that what layers read without having registered it is a parameter of a layer on their stage.

    Args:
        stages: of the layers.

    Raises:
        ValueError: if it is on another one, naming the parameters; and for a module on several stages that has
            parameters and buffers or extra state, which would go apart.
    """
    users_of = users_of_parameters(layers)
    first: dict[nn.Module, tuple[int, str]] = {}
    for number, layer in enumerate(layers):
        for name, parameter in read_parameters(layer):
            users = users_of.setdefault(parameter, [(number, name)])
            if all(stages[user] != stages[number] for user, _ in users):
                raise ValueError(
                    f"{path_of(*users[0])} and {path_of(number, name)} are one parameter, but their layers are, or may "
                    "come to be, on different stages: what a layer refers to must be on its stage, unless both layers "
                    "have it as a parameter of their own (tied weights)"
                )
        for name, module in layer.named_modules():
            user = first.setdefault(module, (number, name))
            if stages[user[0]] == stages[number] or not list(module.parameters()):
                continue
            has_extra = any(type(one).get_extra_state is not nn.Module.get_extra_state for one in module.modules())
            if has_extra or list(module.buffers()):
                raise ValueError(
                    f"{path_of(*user)} and {path_of(number, name)} are one module, whose buffers or extra state would "
                    "go apart on different stages: let modules of their own share the parameters alone"
                )


def path_of(number: int, name: str) -> str:
    return f"layers.{number}.{name}".rstrip(".")


def read_parameters(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that ``layer`` has registered and those that its objects refer to, by where they are."""
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
    left_out = _OF_TORCH | OF_A_BALANCER if isinstance(module, BalancedLinear) else _OF_TORCH
    yield from ((key, value) for key, value in vars(module).items() if key not in left_out)
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
