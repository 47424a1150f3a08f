"""Colossal-AI 0.5: its 1D tensor-parallel linear layers, balanced in place, and what it needs to run on a CPU.

A layer is swapped by changing its class to a subclass that computes the same products through a plan. So it keeps its
very Parameter objects (Booster keys its maps by their ``id``), their ``dist_layout``, its hooks and its names.
"""

from __future__ import annotations

from typing import Any

import torch
from colossalai.accelerator import get_accelerator, set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.shardformer.layer import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from colossalai.shardformer.layer._operation import split_forward_gather_backward
from colossalai.shardformer.layer.qkv_fused_linear import split_forward_gather_backward_fused_qkv
from colossalai.tensor.d_tensor import is_distributed_tensor
from colossalai.tensor.d_tensor.api import init_as_dtensor, is_customized_distributed_tensor
from torch import Tensor, nn

from zeroresize.integrations.hosts import SwappedClasses
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import on_tokens
from zeroresize.utils.torch_private import parameters_of


class _BalancedLinear1D(BalancedLinear):
    """Holds what all balanced layers of Colossal-AI have in common."""

    bias: Any
    skip_bias_add: bool
    parallel_input: bool
    seq_parallel_mode: str | None
    in_features: int
    out_features: int

    @property
    def parts(self) -> tuple[int, ...] | None:  # type: ignore[override]
        if sizes := getattr(self, "split_sizes", None):
            return tuple(sizes)
        size = self.out_features if self.is_column_parallel else self.in_features
        return (size,) if is_distributed_tensor(self.weight) else None

    @property
    def _sequence_dim(self) -> int | None:
        return getattr(self, "seq_parallel_dim", 1) if self.seq_parallel_mode == "split_gather" else None

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any, **kwargs: Any) -> nn.Module:
        """As the layer's own of Colossal-AI, balanced from the start."""
        make: Any = super().from_native_module  # type: ignore[misc]
        layer: nn.Module = make(module, process_group, **kwargs)
        return swap_layer(layer) if why_left_alone(layer) is None else layer

    def __deepcopy__(self, memo: dict[int, Any]) -> BalancedLinear:
        """With the layouts of its parameters, by which Colossal-AI's checkpoints know that they are shards."""
        copied: Any = super().__deepcopy__(memo)
        layer: Any = self
        for name in parameters_of(layer):
            value, other = getattr(layer, name), getattr(copied, name)
            if is_distributed_tensor(value) and not is_distributed_tensor(other):
                layout = value.dist_layout
                init_as_dtensor(other, layout.device_mesh, layout.sharding_spec, layout.global_shape)
            elif is_customized_distributed_tensor(value):
                other.shard_fn, other.gather_fn = value.shard_fn, value.gather_fn
        return copied


class _BalancedColumn(_BalancedLinear1D):
    """A column-parallel layer with a weight [N, K]."""

    is_column_parallel = True

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        bias = None if self.skip_bias_add else self.bias
        output = on_tokens(lambda x: self._products(x, bias), input_)
        return (output, self.bias) if self.skip_bias_add else output

    def _products(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.column_products(x, bias, sequence_dim=self._sequence_dim)


class _BalancedRow(_BalancedLinear1D):
    """A row-parallel layer."""

    is_column_parallel = False

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        output = on_tokens(self._forward, input_)
        return (output, self.bias) if self.skip_bias_add else output

    def _forward(self, x: Tensor) -> Tensor:
        x = x if self.parallel_input else self._own_part(x)
        y = self.row_products(x, sequence_dim=self._sequence_dim)
        return y if self.bias is None or self.skip_bias_add else y + self.bias.to(y.dtype)

    def _own_part(self, x: Tensor) -> Tensor:
        return split_forward_gather_backward(x, dim=-1, process_group=self.process_group)


class _TransposedWeight(_BalancedLinear1D):
    """A layer whose weight is [K, N], as GPT-2's ``Conv1D`` has it; its columns are lent to nobody."""

    weight_is_transposed = True

    @property
    def local_weight(self) -> Tensor:
        return self.weight.t()


class BalancedLinear1D_Col(_BalancedColumn, Linear1D_Col):
    """Computes the three products of ``Linear1D_Col`` (QKV, FC1) by ``self.plan``."""


class BalancedLinear1D_Row(_BalancedRow, Linear1D_Row):
    """Computes the three products of ``Linear1D_Row`` (attention output, FC2) by ``self.plan``."""


class BalancedFusedLinear1D_Col(_BalancedColumn, FusedLinear1D_Col):
    """``FusedLinear1D_Col`` (q, k and v in one): a shard holds a part of each of them, one after the other."""


class BalancedFusedLinear1D_Row(_BalancedRow, FusedLinear1D_Row):
    """``FusedLinear1D_Row``, which reads what a ``FusedLinear1D_Col`` returns."""

    def _own_part(self, x: Tensor) -> Tensor:
        return split_forward_gather_backward_fused_qkv(x, self.split_sizes, self.process_group)


class BalancedGPT2FusedLinearConv1D_Col(_TransposedWeight, _BalancedColumn, GPT2FusedLinearConv1D_Col):
    """``GPT2FusedLinearConv1D_Col`` (q, k and v in one, or FC1)."""

    def _products(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.column_products(x, None, sequence_dim=self._sequence_dim)
        return y if bias is None else (y.flatten(0, -2) + bias).view(y.shape)  # its gradient summed as Colossal-AI's


class BalancedGPT2FusedLinearConv1D_Row(_TransposedWeight, _BalancedRow, GPT2FusedLinearConv1D_Row):
    """``GPT2FusedLinearConv1D_Row`` (attention output, FC2)."""


_BALANCED_CLASSES: dict[type, type] = {
    Linear1D_Col: BalancedLinear1D_Col,
    Linear1D_Row: BalancedLinear1D_Row,
    FusedLinear1D_Col: BalancedFusedLinear1D_Col,
    FusedLinear1D_Row: BalancedFusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col: BalancedGPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row: BalancedGPT2FusedLinearConv1D_Row,
}


def _why_left_alone(module: Any) -> str | None:
    if module.seq_parallel_mode == "ring":
        return "seq_parallel_mode='ring' multiplies a slice of the sequence while the next one travels"
    if module.fp8_communication:
        return "fp8_communication=True"
    if module.use_zbv:
        return "use_zbv=True defers dw to the pipeline schedule"
    if getattr(module, "stream_chunk_num", 1) > 1:
        return "stream_chunk_num > 1 is for inference only"
    return None


#: What ``convert`` asks of Colossal-AI's layers.
_adapter = SwappedClasses(_BALANCED_CLASSES, _why_left_alone)
is_parallel_linear = _adapter.is_parallel_linear
why_left_alone = _adapter.why_left_alone
swap_layer = _adapter.swap_layer


def balanced_policy(policy_class: type) -> type:
    """Return a subclass of a ShardFormer policy that builds balanced layers from the start.

    Use as ``HybridParallelPlugin(..., custom_policy=balanced_policy(ViTForImageClassificationPolicy)())`` or
    ``ShardFormer(...).optimize(model, balanced_policy(...)())``, then call ``zeroresize.convert`` as usual.
    """

    class BalancedPolicy(policy_class):
        def module_policy(self) -> dict[Any, Any]:
            descriptions = super().module_policy()
            for description in descriptions.values():
                for replacement in description.sub_module_replacement or ():
                    target = replacement.target_module
                    replacement.target_module = _BALANCED_CLASSES.get(target, target)
            return descriptions

    BalancedPolicy.__name__ = BalancedPolicy.__qualname__ = f"Balanced{policy_class.__name__}"
    return BalancedPolicy


class _CompleteCpuAccelerator(CpuAccelerator):
    """Colossal-AI's CPU accelerator with the two calls that ShardFormer needs and it lacks."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def prepare_accelerator() -> None:
    """Let Colossal-AI run on a CPU; does nothing where it found a GPU. Call before ``colossalai.launch``."""
    if get_accelerator().name == "cpu":
        set_accelerator(_CompleteCpuAccelerator())
