"""Colossal-AI 0.5: its low-level ZeRO-1 and ZeRO-2 beside tensor parallelism, for weights of other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelZeroOptimizer
from torch import Tensor

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.integrations.replicas import ShardedOptimizer

#: The key of a gradient beside what is kept.
_GRADIENT = "gradient"


class ShardedByColossalai(ShardedOptimizer):
    """Low-level ZeRO-1 and ZeRO-2: of every weight each replica steps an equal shard, the last one filled up by zeros.

    Gradients that a step has used or will use lie in shards, too, and move along.
    """

    steps_empty = False  # in the host's split of a gradient

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.inner = optimizer, optimizer.optim
        weights = optimizer.master_to_working_param
        groups = ((number, group["params"]) for number, group in enumerate(optimizer.param_groups))
        self.weights = {weights[id(shard)]: number for number, shards in groups for shard in shards}
        is_known = type(optimizer) is HybridParallelZeroOptimizer
        self.replicas: Any = next(iter(optimizer.pg_to_param_list)) if is_known else None

    def why_not(self) -> str | None:
        if self.replicas is None:
            kind = type(self._optimizer).__name__
            return f"a {kind} is not known beside tensor parallelism: HybridParallelPlugin(zero_stage=1), or 2, is"
        if self._optimizer._overlap_allgather:
            return "overlap_allgather=True fills weights during the next forward"
        padding, num_shards = self._optimizer.get_param_padding_size, group_size(self.replicas)
        shards = self._optimizer.working_to_master_param
        if any(each.numel() + padding(each) != len(shards[id(each)]) * num_shards for each in self.weights):
            return "it was made before units were divided: pass optimizer= to convert"
        return None

    def part_of(self, weight: Tensor) -> tuple[Tensor, slice, slice]:
        shard = self._optimizer.working_to_master_param[id(weight)]
        begin = 0 if self.replicas is None else len(shard) * group_rank(self.replicas)
        end = max(min(begin + len(shard), weight.numel()), begin)
        return shard, slice(end - begin), slice(begin, end)

    def kept_of(self, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        vectors, others = super().kept_of(weight)
        gradient = self._optimizer.get_working_grad_by_param_id(id(weight))
        return vectors if gradient is None else {**vectors, _GRADIENT: gradient}, others

    def gather(self, weight: Tensor, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        stepped, state = super().gather(weight, scratch)
        if (gradient := state.pop(_GRADIENT, None)) is not None:
            stepped.grad = gradient.to(stepped.dtype)
        return stepped, state

    def rebuild(self) -> None:
        optimizer = self._optimizer
        optimizer.zero_grad_stores()
        optimizer.master_to_working_param.clear()
        self.inner.state.clear()
        for number, group in enumerate(self.inner.param_groups):
            weights = [weight for weight, of in self.weights.items() if of == number]
            group["params"] = shards = optimizer._create_master_param_current_rank(weights)
            optimizer._master_param_groups_of_current_rank[number] = shards

    def put(self, weight: Tensor, stepped: Tensor, state: Mapping[str, Any]) -> None:
        super().put(weight, stepped, state)
        if stepped.grad is not None:
            num_zeros = self._optimizer.get_param_padding_size(weight)
            filled = torch.nn.functional.pad(stepped.grad.flatten(), (0, num_zeros)).to(weight)
            shards, store = filled.chunk(group_size(self.replicas)), self._optimizer.pid_to_grad_store[id(weight)]
            for gradient in [shards[group_rank(self.replicas)]] if self._optimizer._partition_grads else shards:
                store.append_gradients_by_param_id(gradient.clone(), self.weights[weight], id(weight))
