"""What the package must know of an optimizer: the torch optimizer inside a host's wrapper, and what it really steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """``optimizer`` itself, or the one inside Colossal-AI's wrappers.

    Raises:
        ValueError: if there is none.
    """
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer):
        inner = getattr(inner, "optim", None)
        if inner is None:
            raise ValueError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer and has none as its .optim: "
                "pruned_update='freeze' and priority='path_length' need one"
            )
    return inner


def stepped_tensors(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimizer updates for each named parameter: the parameter itself or its fp32 master copy.

    Parameters that it does not update (frozen, or of another optimizer) are left out.

    Raises:
        ValueError: for a parameter whose master copy is stored in another shape (ZeRO's flat shards).
    """
    stepped = _ids_of_stepped(torch_optimizer(optimizer))
    masters = _masters(optimizer)
    found = {}
    for name, parameter in parameters.items():
        tensor = masters.get(id(parameter), parameter)
        if id(tensor) not in stepped:
            continue
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{name}: the optimizer keeps it as {tuple(tensor.shape)} instead of {tuple(parameter.shape)}, as "
                "ZeRO's shards do; pruned_update='freeze' and priority='path_length' need whole parameters"
            )
        found[name] = tensor
    return found


def not_stepped(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters that want gradients and that ``optimizer`` does not know; none where it cannot be told."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    stepped = _ids_of_stepped(optimizer)
    return [name for name, one in parameters.items() if one.requires_grad and id(one) not in stepped]


def states_like(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Iterable[Tensor]:
    """The optimizer's state tensors of ``tensor`` that have its shape, such as its moments."""
    state = optimizer.state.get(tensor, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.shape == tensor.shape]


def _ids_of_stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def _masters(optimizer: Any) -> Mapping[int, Tensor]:
    """Master copies by the ``id`` of the working parameter, as Colossal-AI's wrappers tell; empty for others."""
    get_map = getattr(optimizer, "get_working_to_master_map", None)
    return (get_map() if callable(get_map) else None) or {}
