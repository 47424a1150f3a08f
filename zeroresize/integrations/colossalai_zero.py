"""Colossal-AI 0.5: its low-level ZeRO-1 and ZeRO-2 beside tensor parallelism, for weights of other shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelZeroOptimizer
from torch import Tensor

from zeroresize.comm.collectives import group_rank, group_size, whole_of_parts


class ShardedByColossalai:
    """Low-level ZeRO-1 and ZeRO-2: of every weight each replica steps an equal shard, the last one filled up by zeros.

    Gradients that a step has used or will use lie in shards, too, and move along.
    """

    steps_empty = False  # in the host's split of a gradient

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._inner, self._keys = optimizer, optimizer.optim, set[str]()
        weights = optimizer.master_to_working_param
        groups = ((number, group["params"]) for number, group in enumerate(optimizer.param_groups))
        self._group_of = {weights[id(shard)]: number for number, shards in groups for shard in shards}
        self.weights: list[Tensor] = list(self._group_of)
        is_known = type(optimizer) is HybridParallelZeroOptimizer
        self.averages_over: Any = next(iter(optimizer.pg_to_param_list)) if is_known else None

    def why_not(self) -> str | None:
        if self.averages_over is None:
            kind = type(self._optimizer).__name__
            return f"a {kind} is not known beside tensor parallelism: HybridParallelPlugin(zero_stage=1), or 2, is"
        if self._optimizer._overlap_allgather:
            return "overlap_allgather=True fills weights during the next forward"
        padding, num_shards = self._optimizer.get_param_padding_size, group_size(self.averages_over)
        if any(each.numel() + padding(each) != len(self._held(each)[0]) * num_shards for each in self.weights):
            return "it was made before units were divided: pass optimizer= to convert"
        return None

    def bytes_of(self, weight: Tensor) -> int:
        if weight not in self._group_of:  # it is frozen
            return 0
        shard, state, gradient = self._held(weight)
        of_state = sum(state[key].itemsize for key in _keys_of(state, shard))
        return weight.numel() * (of_state + shard.itemsize * (1 if gradient is None else 2))

    def describe(self) -> Any:
        kinds = []
        for weight in self.weights:
            shard, state, gradient = self._held(weight)
            keys = _keys_of(state, shard)
            dtypes = [(key, str(state[key].dtype)) for key in sorted(keys)]
            numbers = [(key, _plain(state[key])) for key in sorted(state.keys() - keys)]
            kinds.append([dtypes, str(numbers), gradient is None])
        return kinds

    def gather(self, weight: Tensor, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        shard, state, gradient = self._held(weight)
        stepped = self._whole(weight, shard, scratch)
        keys = _keys_of(state, shard)
        self._keys |= keys
        state |= {key: self._whole(weight, state[key], scratch) for key in sorted(keys)}
        if gradient is not None:
            stepped.grad = self._whole(weight, gradient, scratch).to(stepped.dtype)
        return stepped, state

    def rebuild(self) -> None:
        optimizer = self._optimizer
        optimizer.zero_grad_stores()
        optimizer.master_to_working_param.clear()
        self._inner.state.clear()
        for number, group in enumerate(self._inner.param_groups):
            weights = [weight for weight, of in self._group_of.items() if of == number]
            group["params"] = shards = optimizer._create_master_param_current_rank(weights)
            optimizer._master_param_groups_of_current_rank[number] = shards

    def put(self, weight: Tensor, stepped: Tensor, state: Mapping[str, Any]) -> None:
        shard, rank = self._held(weight)[0], group_rank(self.averages_over)
        shard.copy_(self._shards(weight, stepped)[rank])
        for key, value in state.items():
            here = self._shards(weight, value)[rank].to(shard.device) if key in self._keys else value
            self._inner.state[shard][key] = here.clone() if isinstance(here, Tensor) else here
        if stepped.grad is not None:
            shards = self._shards(weight, stepped.grad.to(weight.dtype))
            store = self._optimizer.pid_to_grad_store[id(weight)]
            for gradient in [shards[rank]] if self._optimizer._partition_grads else shards:
                store.append_gradients_by_param_id(gradient.clone(), self._group_of[weight], id(weight))

    def _held(self, weight: Tensor) -> tuple[Tensor, dict[str, Any], Tensor | None]:
        """What this replica steps of a weight, and its state and gradient."""
        shard = self._optimizer.working_to_master_param[id(weight)]
        gradient = self._optimizer.get_working_grad_by_param_id(id(weight))
        return shard, dict(self._inner.state.get(shard, {})), gradient

    def _whole(self, weight: Tensor, shard: Tensor, scratch: Tensor) -> Tensor:
        """All replicas' shards as a tensor of the weight's shape, on the CPU; collective."""
        begin = len(shard) * group_rank(self.averages_over)
        held, place = shard[: max(weight.numel() - begin, 0)], slice(begin, begin + len(shard))
        return whole_of_parts(held, place, weight, self.averages_over, scratch, shard.dtype)

    def _shards(self, weight: Tensor, whole: Tensor) -> Sequence[Tensor]:
        """What each replica has of a tensor of the weight's shape."""
        num_zeros = self._optimizer.get_param_padding_size(weight)
        filled = torch.nn.functional.pad(whole.detach().flatten(), (0, num_zeros))
        return filled.to(weight.device).chunk(group_size(self.averages_over))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _keys_of(state: Mapping[str, Any], shard: Tensor) -> set[str]:
    """What is kept of a shard by element; a number of steps never is."""
    of_shape = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shard.shape}
    return of_shape - {"step"}
