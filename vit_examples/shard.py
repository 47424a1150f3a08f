"""What one rank has of a model in training, by name: its weights, their master copies, and AdamW's moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.optim.optimizers import stepped_tensors, torch_optimizer

_MOMENTS = "optimizer."
_ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")


def shard_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The tensors themselves; moments are there once the optimizer has stepped."""
    weights, stepped = _weights_and_stepped(model, optimizer)
    state = torch_optimizer(optimizer).state
    moments = {
        _moment(name, key): state[tensor][key]
        for name, tensor in stepped.items()
        for key in _ADAMW_STATE
        if key in state.get(tensor, {})
    }
    return weights | moments


def has_stepped(names: Iterable[str]) -> bool:
    """Whether the names of a shard are those of one whose optimizer has stepped: in fp16 it may not have yet."""
    return any(name.startswith(_MOMENTS) for name in names)


def kinds_of_shard(model: nn.Module, optimizer: Any, *, stepped: bool) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Of all that :func:`shard_of` has, before or after the optimizer has ``stepped``."""
    weights, to_step = _weights_and_stepped(model, optimizer)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    for name, tensor in to_step.items() if stepped else ():
        moment, count = (tensor.dtype, tensor.shape), (torch.float32, torch.Size())
        kinds |= {_moment(name, key): count if key == "step" else moment for key in _ADAMW_STATE}
    return kinds


def load_shard(model: nn.Module, optimizer: Any, found: Mapping[str, Tensor]) -> None:
    """Take over a shard, with the tensors that :func:`kinds_of_shard` names."""
    weights, stepped = _weights_and_stepped(model, optimizer)
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(found[name])
    inner = torch_optimizer(optimizer)
    names = {id(tensor): name for name, tensor in stepped.items()}
    order = [names.get(id(tensor)) for group in inner.param_groups for tensor in group["params"]]
    moments = {
        number: {key: found[_moment(name, key)].clone() for key in _ADAMW_STATE}
        for number, name in enumerate(order)
        if name is not None and has_stepped(found)
    }
    inner.load_state_dict({"state": moments, "param_groups": inner.state_dict()["param_groups"]})


def _weights_and_stepped(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All but moments, by their names in a shard, and what the optimizer steps, by its parameters' names."""
    parameters = dict(model.named_parameters())
    stepped = stepped_tensors(optimizer, parameters)
    weights = {f"model.{name}": tensor.detach() for name, tensor in (*parameters.items(), *model.named_buffers())}
    masters = {name: tensor for name, tensor in stepped.items() if tensor is not parameters[name]}
    return weights | {f"master.{name}": tensor.detach() for name, tensor in masters.items()}, stepped


def _moment(name: str, key: str) -> str:
    return f"{_MOMENTS}{name}.{key}"
