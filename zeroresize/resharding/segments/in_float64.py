"""in_float64(): a model computes in float64 for a while, with everything else out of its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zeroresize.integrations.hidden_state import restored
from zeroresize.kernels.probe import Probes
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_flat_parameters, is_sharded
from zeroresize.utils.torch_private import buffers_of, hooks_of, is_dtensor, parameters_of


def require_replaceable(model: nn.Module) -> None:
    """Check that parameters can be replaced by others for a while: those that FSDP gathers in every forward cannot.

    Raises:
        ValueError: naming one that cannot.
    """
    is_fully_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        is_whole = not is_sharded(parameter) or (is_dtensor(parameter) and not is_fully_sharded)
        if is_flat_parameters(parameter) or not is_whole:
            raise ValueError(
                f"check_segments: {name} is a {type(parameter).__name__} of which FSDP shards and gathers the values: "
                "check the model before FSDP has it"
            )


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Give ``model`` other parameters and buffers while the block lasts, of equal values in float64.

    Afterwards it holds its own, whatever was done: their values, gradients, hooks and optimizer state were not touched.
    What its modules hold besides is restored, too. Nothing that balances or measures is at work meanwhile.
    """
    with restored(model):
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, BalancedLinear):
                _let_alone(module)
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = copies.setdefault(id(tensor), _copy(tensor))  # type: ignore[assignment]
        yield


def to_float64(value: Any) -> Any:
    """Return ``value`` with all real floating-point tensors in it in float64; containers are new ones."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: to_float64(one) for key, one in value.items()}
        try:
            return type(value)(items)
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_float64, value))
    if isinstance(value, list | tuple):
        return type(value)(map(to_float64, value))
    return value


def _copy(tensor: Tensor) -> Tensor:
    values = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    values = values.clone(memory_format=torch.preserve_format)
    if not isinstance(tensor, nn.Parameter):
        return values
    copy = nn.Parameter(values, requires_grad=tensor.requires_grad)
    for mark, value in vars(tensor).items():  # by which hosts know it
        vars(copy).setdefault(mark, value)
    return copy


def _let_alone(layer: Any) -> None:
    """No plan, loan, measurement or check of a balancer in a layer."""
    layer.plan = layer.loans = layer.last = layer.watch_start = layer.watch_forward = layer.watch_input = None
    layer.probes = Probes()
    hooks = hooks_of(layer, "forward_pre")
    for key in [key for key, one in hooks.items() if getattr(one, "__module__", "").startswith("zeroresize.")]:
        del hooks[key]
