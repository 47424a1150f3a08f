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
import torch
from deepspeed.module_inject.layers import (
    DS_TENSOR_MODEL_PARALLEL,
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
)
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor, nn

from zeroresize.comm.collectives import whole_of_parts
from zeroresize.integrations.hosts import SwappedClasses
from zeroresize.layers.balanced_linear import BalancedLinear

#: Arguments of ZeRO's constructor that it keeps by other names; what it is given besides; what it goes on with.
_KEPT_AS = {
    "partition_grads": "partition_gradients",
    "expert_parallel_group": "ep_process_group",
    "expert_data_parallel_group": "expert_dp_process_group",
}
_MASTER, _GROUPS = "param", "_groups_of_weights"
_NOT_KEPT = {"optimizer_params": None, "static_loss_scale": 1.0}
_GOING_ON = (
    *("loss_scaler", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale", "_global_grad_norm"),
    *("overflow", "_backward_hook_state", "_is_gradient_accumulation_boundary"),
)


class _GatheredAtHome:
    """What DeepSpeed gathers by its own division: no weight of units that are away."""

    def gather_params(self: Any, params_list: list[Tensor]) -> None:
        if self.segment is not None and not self.segment.owned.is_home:
            raise RuntimeError(
                f"DeepSpeed gathers {self.name_in_model}, whose units are away: have them at home, "
                "`with balancer.at_home(): ...` on every rank of the group"
            )
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
process_group_of = _adapter.process_group_of


def is_parallel_linear(module: nn.Module) -> bool:
    """Tell whether ``module`` is a linear layer that AutoTP has split."""
    return isinstance(module, TensorParallel_Layer)


def why_left_alone(module: Any) -> str | None:
    """Tell why a layer stays as it is, for a log line; None if it can be balanced."""
    if not deepspeed.__version__.startswith("0.19."):
        return f"it is of DeepSpeed {deepspeed.__version__}; 0.19 is known"
    return _adapter.why_left_alone(module)


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


class ReducerOfDdp:
    """DeepSpeed's engine, which averages what gradients there are at the end of a step, in buckets made then."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.process_group = engine, engine.seq_data_parallel_group

    def averaged(self) -> Iterable[Tensor]:
        weights: Iterable[Tensor] = self._engine.module.parameters()
        return weights

    def why_not_rebuilt(self) -> str | None:
        return None

    def beside(self) -> Iterable[Tensor]:
        return ()

    def bytes_to_rebuild(self, num_more: int) -> int:
        names = "bit16_groups_flat", "single_partition_of_fp32_groups"  # the old ones are there meanwhile
        held = [each for name in names for each in getattr(self._engine.optimizer, name, ())]
        return sum(each.nbytes for each in held) + max(num_more, 0) * sum({each.itemsize for each in held})

    def drop(self) -> None:
        """Nothing is made for shapes: ZeRO's vectors are made anew by its optimizer."""

    note_step = rebuild = drop


class ShardedByDeepSpeed:
    """ZeRO-1 and ZeRO-2: every group of weights is one vector in float32, of which each replica steps a part."""

    averages_over, steps_empty = None, True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._inner = optimizer, optimizer.optimizer
        # It forgets weights that are empty on a rank.
        groups = vars(optimizer).setdefault(_GROUPS, list(map(tuple, getattr(optimizer, "bit16_groups", ()))))
        self._group_of = {weight: number for number, group in enumerate(groups) for weight in group}
        self.weights: list[Tensor] = list(self._group_of)

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

    def bytes_of(self, weight: Tensor) -> int:
        if weight not in self._group_of:  # it is frozen
            return 0
        return weight.numel() * torch.float32.itemsize * (1 + len(self._keys_of(self._part_of(weight))))

    def describe(self) -> Any:
        if self._optimizer.micro_step_id != INITIAL_MICRO_STEP_ID:
            raise ValueError("it holds gradients of a step under way")
        kinds = [
            [(key, value.dtype if key in self._keys_of(part) else _plain(value)) for key, value in state.items()]
            for part, state in self._states.items()
        ]
        return [str(kinds), len(self.weights)]

    def gather(self, weight: Any, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        part, place = self._part_of(weight), weight._hp_mapping
        of_part = {_MASTER: part.detach(), **self._states[part]}
        for key in (_MASTER, *self._keys_of(part)):
            vector, held, at = of_part[key], None, slice(0)
            if place is not None:
                of_weight = place.lp_fragment_address
                at = slice(of_weight.start, of_weight.start + of_weight.numel)
                held = _at(vector, place.hp_fragment_address)
            of_part[key] = whole_of_parts(held, at, weight, weight._dp_group, scratch, vector.dtype)
        return of_part.pop(_MASTER), of_part

    def rebuild(self) -> None:
        """Call the constructor again, of the same optimizer in the same object."""
        optimizer, inner = self._optimizer, self._inner
        optimizer.destroy()
        for number, group in enumerate(inner.param_groups):
            group["params"] = [weight for weight, of in self._group_of.items() if of == number]
        inner.state.clear()
        names = [*inspect.signature(DeepSpeedZeroOptimizer.__init__).parameters][2:]
        kept = {name: _KEPT_AS.get(name, name) for name in names}
        given = {name: vars(optimizer)[of] for name, of in kept.items() if of in vars(optimizer)}
        going_on = {name: vars(optimizer)[name] for name in _GOING_ON}
        DeepSpeedZeroOptimizer.__init__(optimizer, inner, **_NOT_KEPT, **given)
        vars(optimizer).update(going_on, optimizer=inner)

    def put(self, weight: Any, stepped: Tensor, state: Mapping[str, Any]) -> None:
        part, place = self._part_of(weight), weight._hp_mapping
        vectors, kept = [(part.detach(), stepped.detach())], self._inner.state[part] if state else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                vectors.append((kept.setdefault(key, torch.zeros_like(part.detach(), dtype=value.dtype)), value))
            else:
                kept[key] = value.clone() if isinstance(value, Tensor) else value
        if place is None:
            return
        for vector, whole in vectors:
            _at(vector, place.hp_fragment_address).copy_(_at(whole.flatten(), place.lp_fragment_address))
        if state:
            place.set_optim_state_fragment(part, kept)

    @property
    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """What is kept of what this replica steps of each group."""
        return {part: self._inner.state.get(part, {}) for part in self._optimizer.single_partition_of_fp32_groups}

    def _keys_of(self, part: Tensor) -> list[str]:
        """What is kept of a group by element."""
        kept = self._states[part].items()
        return [key for key, value in kept if isinstance(value, Tensor) and value.shape == part.shape]

    def _part_of(self, weight: Tensor) -> Tensor:
        """What this replica steps of the weight's group."""
        part: Tensor = self._optimizer.single_partition_of_fp32_groups[self._group_of[weight]]
        return part

    @property
    def _have_whole_weights(self) -> bool:
        """Whether each group has a weight that AutoTP has not split: it cannot be empty."""
        whole = {number for weight, number in self._group_of.items() if not hasattr(weight, DS_TENSOR_MODEL_PARALLEL)}
        return len(whole) == len(self._inner.param_groups)


def _at(vector: Tensor, place: Any) -> Tensor:
    """A part of a vector, by DeepSpeed's address of it."""
    return vector.narrow(0, place.start, place.numel)


def _plain(value: Any) -> Any:
    """What is kept of all elements, without where it lies."""
    return value.tolist() if isinstance(value, Tensor) else value
