"""DeepSpeed 0.19: the linear layers that AutoTP has split for training, balanced in place, and ZeRO-1 and ZeRO-2.

Home is DeepSpeed's own division, also where ranks have different numbers of heads. Layers of ZeRO-3, of fused
projections, of inference, and those whose collectives a compiler inserts stay as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed
from deepspeed.module_inject.layers import (
    DS_TENSOR_MODEL_PARALLEL,
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
)
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor, nn

from zeroresize.integrations.hosts import SwappedClasses
from zeroresize.integrations.replicas import Reducer, ShardedOptimizer
from zeroresize.layers.balanced_linear import BalancedLinear

#: Arguments of ZeRO's constructor that it keeps by other names; what it is given besides; what it goes on with.
_KEPT_AS = {
    "partition_grads": "partition_gradients",
    "expert_parallel_group": "ep_process_group",
    "expert_data_parallel_group": "expert_dp_process_group",
}
_GROUPS = "_groups_of_weights"
_NOT_KEPT = {"optimizer_params": None, "static_loss_scale": 1.0}
_GOING_ON = (
    *("loss_scaler", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale", "_global_grad_norm"),
    *("overflow", "_backward_hook_state", "_is_gradient_accumulation_boundary"),
)


class _GatheredAtHome:
    """What DeepSpeed gathers by its own division: no weight of units that are away."""

    def gather_params(self: Any, params_list: list[Tensor]) -> None:
        self.require_home("DeepSpeed gathers")
        super().gather_params(params_list)  # type: ignore[misc]


class BalancedLinearLayer(_GatheredAtHome, BalancedLinear, LinearLayer):
    """``LinearLayer`` (q, k, v; gate, up) by ``self.plan``: x [..., K] → y [..., N of this rank]."""

    is_column_parallel = True

    def forward(self, input: Tensor) -> Tensor:
        return self.column_products(input, self.bias)


class BalancedLinearAllreduce(_GatheredAtHome, BalancedLinear, LinearAllreduce):
    """``LinearAllreduce`` (attention output; down) by ``self.plan``: x [..., K of this rank] → y [..., N]."""

    is_column_parallel = False

    def forward(self, input: Tensor) -> Tensor:
        y = self.row_products(input)
        return y if self.bias is None else y + self.bias


def _why_left_alone(layer: Any) -> str | None:
    if not deepspeed.__version__.startswith("0.19."):
        return f"it is of DeepSpeed {deepspeed.__version__}; 0.19 is known"
    if layer.mp_group is None:
        return "AutoTP has given it no group of ranks"
    if layer.defer_collectives_to_compiler:
        return "a compiler inserts its collectives (compile passes ['autotp'])"
    if not layer.is_training_mode():
        return "AutoTP has split it for inference"
    if empty := [rank for rank, size in enumerate(layer._partition_sizes) if size == 0]:
        return f"AutoTP leaves ranks {empty} of the group nothing of it"
    return None


_adapter = SwappedClasses(
    {LinearLayer: BalancedLinearLayer, LinearAllreduce: BalancedLinearAllreduce},
    _why_left_alone,
    process_group_of=lambda layer: layer.mp_group,
)
process_group_of, why_left_alone = _adapter.process_group_of, _adapter.why_left_alone


def is_parallel_linear(module: nn.Module) -> bool:
    """Tell whether ``module`` is a linear layer that AutoTP has split."""
    return isinstance(module, TensorParallel_Layer)


def swap_layer(module: Any) -> Any:
    """Make a layer a :class:`BalancedLinear` in place, with DeepSpeed's division as its home."""
    sizes = module._partition_sizes
    if len(set(sizes)) > 1 and not isinstance(module, BalancedLinear):
        unit = math.gcd(*sizes)
        module.parts, module.division = (sum(sizes),), tuple(size // unit for size in sizes)
    module = _adapter.swap_layer(module)
    for weight in module.parameters(recurse=False):
        if hasattr(weight, "gather_params"):  # which is the method of before
            weight.gather_params = module.gather_params
    return module


class ReducerOfDdp(Reducer):
    """DeepSpeed's engine, which averages what gradients there are at the end of a step, in buckets made then.

    ZeRO's vectors are made anew by its optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.process_group = engine, engine.seq_data_parallel_group

    def averaged(self) -> Iterable[Tensor]:
        weights: Iterable[Tensor] = self._engine.module.parameters()
        return weights

    def bytes_to_rebuild(self, num_more: int) -> int:
        names = "bit16_groups_flat", "single_partition_of_fp32_groups"  # the old ones are there meanwhile
        held = [each for name in names for each in getattr(self._engine.optimizer, name, ())]
        return sum(each.nbytes for each in held) + max(num_more, 0) * sum({each.itemsize for each in held})


class ShardedByDeepSpeed(ShardedOptimizer):
    """ZeRO-1 and ZeRO-2: every group of weights is one vector in float32, of which each replica steps a part."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.inner, self.replicas = optimizer, optimizer.optimizer, optimizer.dp_process_group
        # It forgets weights that are empty on a rank.
        groups = vars(optimizer).setdefault(_GROUPS, list(map(tuple, getattr(optimizer, "bit16_groups", ()))))
        self.weights = {weight: number for number, group in enumerate(groups) for weight in group}

    def why_not(self) -> str | None:
        optimizer = self._optimizer
        if type(optimizer) is not DeepSpeedZeroOptimizer:
            return f"a {type(optimizer).__name__} may keep more"
        of_settings = {
            "a group of its weights has none that is whole on every rank": not self._have_whole_weights,
            "it keeps state on the CPU (offload)": optimizer.cpu_offload,
            "it has experts": optimizer.has_moe_layers,
            "round_robin_gradients=True, by which DeepSpeed mistakes weights": optimizer.round_robin_gradients,
            "its master weights are not in float32": optimizer.low_precision_master_weights_and_grads,
            "autocast scales its losses": optimizer.torch_autocast_gradscaler is not None,
        }
        return next((why for why, is_so in of_settings.items() if is_so), None)

    def part_of(self, weight: Any) -> tuple[Tensor, slice, slice]:
        part, place = self._optimizer.single_partition_of_fp32_groups[self.weights[weight]], weight._hp_mapping
        if place is None:
            return part, slice(0), slice(0)
        return part, _slice_of(place.hp_fragment_address), _slice_of(place.lp_fragment_address)

    def describe(self) -> Any:
        if self._optimizer.micro_step_id != INITIAL_MICRO_STEP_ID:
            raise ValueError("it holds gradients of a step under way")
        return super().describe()

    def rebuild(self) -> None:
        """Call the constructor again, of the same optimizer in the same object."""
        optimizer, inner = self._optimizer, self.inner
        optimizer.destroy()
        for number, group in enumerate(inner.param_groups):
            group["params"] = [weight for weight, of in self.weights.items() if of == number]
        inner.state.clear()
        names = [*inspect.signature(DeepSpeedZeroOptimizer.__init__).parameters][2:]
        kept = {name: _KEPT_AS.get(name, name) for name in names}
        given = {name: vars(optimizer)[of] for name, of in kept.items() if of in vars(optimizer)}
        going_on = {name: vars(optimizer)[name] for name in _GOING_ON}
        DeepSpeedZeroOptimizer.__init__(optimizer, inner, **_NOT_KEPT, **given)
        vars(optimizer).update(going_on, optimizer=inner)

    def put(self, weight: Any, stepped: Tensor, state: Mapping[str, Any]) -> None:
        super().put(weight, stepped, state)
        if state and weight._hp_mapping is not None:
            part, *_ = self.part_of(weight)
            weight._hp_mapping.set_optim_state_fragment(part, self.inner.state[part])

    @property
    def _have_whole_weights(self) -> bool:
        """Whether each group has a weight that AutoTP has not split: it cannot be empty."""
        whole = {number for weight, number in self.weights.items() if not hasattr(weight, DS_TENSOR_MODEL_PARALLEL)}
        return len(whole) == len(self.inner.param_groups)


def _slice_of(address: Any) -> slice:
    """Where a part of a vector is, by DeepSpeed's address of it."""
    return slice(address.start, address.start + address.numel)
