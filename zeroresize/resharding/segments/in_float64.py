"""in_float64(): a model computes in float64 for a while, with everything else out of its way."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.integrations.module_state import restored
from zeroresize.kernels.probe import Probes
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_wrapped_by_fsdp
from zeroresize.utils.torch_private import (
    buffers_of,
    hooks_of,
    is_dtensor,
    is_flat_parameter,
    is_tensor_of_tensors,
    parameters_of,
)


def require_replaceable(model: nn.Module, who: str = "check_segments") -> None:
    """Raise ValueError for a parameter that others cannot replace for a while, as FSDP gathers it in every forward."""
    is_fully_sharded = any(is_wrapped_by_fsdp(module) for module in model.modules())
    for name, parameter in model.named_parameters():
        is_whole = not is_tensor_of_tensors(parameter) or (is_dtensor(parameter) and not is_fully_sharded)
        if is_flat_parameter(parameter) or not is_whole:
            raise ValueError(
                f"{who}: {name} is a {type(parameter).__name__} of which FSDP shards and gathers the values: "
                "check the model before FSDP has it"
            )


@contextmanager
def in_float64(model: nn.Module, dtype: torch.dtype | None = torch.float64) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Give ``model`` other parameters and buffers while the block lasts, of equal values in float64.

    Afterwards it holds its own, whatever was done: their values, gradients, hooks and optimizer state were not touched.
    What its modules hold besides is restored, too. Nothing that balances or measures is at work meanwhile.

    Args:
        dtype: another one to compute in; None for that of each tensor.

    Yields:
        each of its own tensors and the one that takes its place.
    """
    with restored(model):
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            if isinstance(module, BalancedLinear):
                _let_alone(module)
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        _, tensors[name] = copies.setdefault(id(tensor), (tensor, _copy(tensor, dtype)))  # type: ignore[assignment]
        yield list(copies.values())


def to_float64(value: Any, dtype: torch.dtype | None = torch.float64) -> Any:
    """Return ``value`` with all real floating-point tensors in it in float64; containers are new ones."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype or value.dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: to_float64(one, dtype) for key, one in value.items()}
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_float64(one, dtype) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(to_float64(one, dtype) for one in value)
    return value


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    values = tensor.detach().to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor.detach()
    values = values.clone(memory_format=torch.preserve_format)
    if not isinstance(tensor, nn.Parameter):
        return values
    copy = nn.Parameter(values, requires_grad=tensor.requires_grad)
    for mark, value in vars(tensor).items():  # by which hosts know it
        vars(copy).setdefault(mark, _bound_to(copy, value) if getattr(value, "__self__", None) is tensor else value)
    return copy


def _bound_to(copy: Tensor, method: Any) -> Any:
    """Return a method of another tensor for ``copy``: Colossal-AI gives its parameters a ``detach`` of their own."""
    function = method.__func__ if isinstance(method, types.MethodType) else getattr(Tensor, method.__name__)
    return types.MethodType(function, copy)


def _let_alone(layer: Any) -> None:
    """No plan, loan, measurement or check of a balancer in a layer."""
    layer.plan = layer.loans = layer.last = layer.watch_start = layer.watch_forward = layer.watch_input = None
    layer.probes = Probes()
    hooks = hooks_of(layer, "forward_pre")
    for key in [key for key, one in hooks.items() if getattr(one, "__module__", "").startswith("zeroresize.")]:
        del hooks[key]
