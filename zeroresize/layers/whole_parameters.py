"""Layers that travel as a whole, from stage to stage or from strategy to strategy, need parameters of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from zeroresize.layers.weight_checks import is_wrapped_by_fsdp


def require_whole_parameters(layers: Sequence[nn.Module]) -> None:
    """Check that the layers' parameters are whole tensors of their own.

    Raises:
        ValueError: for layers inside DistributedDataParallel or FSDP, and for other tensors than plain ones, such as
            DTensors and lazily made parameters.
    """
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


def path_of(number: int, name: str) -> str:
    return f"layers.{number}.{name}".rstrip(".")
