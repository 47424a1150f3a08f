"""Megatron-Core's flat buffers of gradients and weights, and its optimizer in parts, for weights of other shapes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from zeroresize.comm.collectives import all_gather
from zeroresize.integrations.replicas import Reducer, ShardedOptimizer
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.torch_private import version_of

#: Attributes of the wrapper that are of the shapes that weights had when it was made.
_MADE = (
    *("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups"),
    *("param_to_bucket_group", "full_param_layout"),
)
#: Settings with which something else knows the buffers, or weights are not in them, or in another form.
_REFUSED = (
    *("overlap_param_gather", "nccl_ub", "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
    *("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"),
)
#: What a constructor of the optimizer is given beside its optimizer and the buffers.
_GIVEN = "config", "grad_scaler", "init_state_fn", "model_chunks"
_GIVEN_LAST = *(f"data_parallel_group{end}" for end in ("", "_gloo", "_idx")), "distributed_optimizer_instance_id"
#: The attribute with the number of each weight's group.
_GROUP_OF_EACH = "_group_of_each"
#: The attribute of a wrapper with how often its buffers of gradients had been written to when a step had used them.
_STEPPED = "_versions_stepped"
#: Wrappers whose DistributedOptimizer is known.
_in_parts: weakref.WeakSet[Any] = weakref.WeakSet()


def _why_set(*configs: Any) -> str | None:
    """Name a setting with which units do not move."""
    name = next((name for config in configs for name in _REFUSED if getattr(config, name, False)), None)
    return None if name is None else f"units are not known to move with {name}=True"


class ReducerOfDdp(Reducer):
    """The buckets of Megatron-Core's DistributedDataParallel.

    Its hooks on gradient accumulators stay: they ask the wrapper, by the weight, where a gradient belongs.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self.process_group = wrapper, wrapper.dp_cp_group
        self._is_one_group = wrapper.bucket_size is None and len(wrapper.bucket_groups) == 1

    def averaged(self) -> list[Tensor]:
        return [weight for weight in self._wrapper.param_to_bucket_group if getattr(weight, "allreduce", True)]

    def why_not_rebuilt(self) -> str | None:
        config = self._wrapper.ddp_config
        if type(self._wrapper) is not DistributedDataParallel:
            return f"a {type(self._wrapper).__name__} may keep more"
        if config.num_distributed_optimizer_instances > 1:
            return "num_distributed_optimizer_instances is above 1"
        if config.use_distributed_optimizer and self._wrapper not in _in_parts:
            return "use_distributed_optimizer=True, and its DistributedOptimizer was not given"
        if any(getattr(weight, "is_managed_by_layer_wise_optimizer", False) for weight in self.averaged()):
            return "a LayerWiseDistributedOptimizer steps its weights"
        if self._versions != vars(self._wrapper).get(_STEPPED) and any(each.grad_data.any() for each in self._buffers):
            return "they hold gradients that no step has used: move units between a step and the next backward"
        return _why_set(config)

    @property
    def _buffers(self) -> list[Any]:
        return [*self._wrapper.buffers, *self._wrapper.expert_parallel_buffers]

    @property
    def _versions(self) -> list[int]:
        return [version_of(buffer.grad_data) for buffer in self._buffers]

    def note_step(self) -> None:
        vars(self._wrapper)[_STEPPED] = self._versions

    def beside(self) -> Iterable[Tensor]:
        names = ["main_grad", *["main_param"] * self._wrapper.ddp_config.use_distributed_optimizer]
        held = (getattr(weight, name, None) for weight in self._wrapper.param_to_bucket_group for name in names)
        return (tensor for tensor in held if tensor is not None)

    def bytes_to_rebuild(self, num_more: int) -> int:
        held = [(each.param_data, each.grad_data) for each in self._buffers]
        sizes = [each.itemsize for of_buffer in held for each in of_buffer if each is not None]
        weights = sum(each.nbytes for each, _ in held if each is not None)  # the old ones are copied
        return weights + max(num_more, 0) * sum(sizes)

    def drop(self) -> None:
        for weight in self._wrapper.param_to_bucket_group:
            for each in (weight, getattr(weight, "main_param", None)):
                if each is not None and each.grad is weight.main_grad:  # which a step has used
                    each.grad = None
            weight.main_grad = None
        for buffer in self._buffers:
            buffer.offload_to_cpu(move_params=False)  # frees gradients, whoever holds the buffer
        vars(self._wrapper).update(dict.fromkeys(_MADE, ()))

    def rebuild(self) -> None:
        """Take the buffers of another wrapper, of a module that shows it no weights to put hooks on."""
        wrapper = self._wrapper
        named = [each for each in wrapper.module.named_parameters() if each[1].requires_grad]
        groups = {name: getattr(wrapper, f"{name}_group") for name in ("dp", "dp_cp", "expt_dp", "tp", "pp", "ep")}
        layout = self._layout_apart(named) if wrapper.ddp_config.use_distributed_optimizer else None
        made = DistributedDataParallel(
            wrapper.config,
            wrapper.ddp_config,
            SimpleNamespace(named_parameters=lambda: named, parameters=tuple, apply=lambda function: None),
            disable_bucketing=self._is_one_group,
            pg_collection=ProcessGroupCollection(**groups),
            full_param_layout=layout,
        )
        vars(wrapper).update({name: vars(made)[name] for name in _MADE})

    def _layout_apart(self, named: list[tuple[str, Any]]) -> Any:
        """Lay out buffers, while units are away with weights last, in this order, that must lie alike on all ranks.

        Gradients that finalize_model_grads sums over the tensor-parallel group are those of replicas together only in
        the part of a bucket that this replica steps.
        """
        wrapper, apart = self._wrapper, dict[Any, Any]()
        layers = (module for module in wrapper.module.modules() if isinstance(module, BalancedLinear))
        if not all(layer.segment is None or layer.segment.owned.is_home for layer in layers):
            named.sort(key=lambda each: not self._is_summed(*each))
            apart = {weight.dtype: weight for name, weight in named if self._is_summed(name, weight)}
        for weight in apart.values():
            weight.shared_embedding = True  # by which a bucket begins, and the next one behind it
        sizes = wrapper.intra_dp_cp_group.size(), wrapper.ddp_config, wrapper.intra_expt_dp_group.size()
        layout = DistributedOptimizer.compute_full_param_layout(
            [weight for _, weight in named], wrapper.bucket_size, *sizes
        )
        for weight in apart.values():
            del weight.shared_embedding
        return layout

    def _is_summed(self, name: str, weight: Any) -> bool:
        config = self._wrapper.config
        is_of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        is_of_parts = config.sequence_parallel and getattr(weight, "sequence_parallel", False)
        return is_of_heads or is_of_parts or getattr(weight, "average_gradients_across_tp_domain", False)


class ShardedByMegatron(ShardedOptimizer):
    """Megatron-Core's DistributedOptimizer over the buffers of one wrapper."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.inner = optimizer, optimizer.optimizer
        self.replicas = getattr(optimizer, "data_parallel_group", None)
        self.weights = dict.fromkeys(each for buffer in getattr(optimizer, "buffers", ()) for each in buffer.params)
        _in_parts.update(optimizer.model_chunks)

    def why_not(self) -> str | None:
        if self.replicas is None:
            return "it knows no group of replicas, as with use_megatron_fsdp=True, or where it steps nothing"
        if len(self._optimizer.model_chunks) > 1:
            return "it steps several chunks of a model"
        if not self._shards:
            return "a rank has no part of what it steps"
        return _why_set(self._optimizer.config, self._optimizer.ddp_config)

    def part_of(self, weight: Tensor) -> tuple[Tensor, slice, slice]:
        if weight not in self._optimizer.model_param_group_index_map:
            return next(iter(self._shards), torch.empty(0)), slice(0), slice(0)
        group, place = self._optimizer.model_param_group_index_map[weight]
        buffer, dtype, bucket = self._optimizer.model_param_gbuf_map[weight]
        part = self._optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][weight]["param"]
        return self.inner.param_groups[group]["params"][place], slice(None), slice(part.start, part.end)

    def has_master(self, weight: Tensor) -> bool:
        return weight.dtype != torch.float32

    def gather(self, weight: Tensor, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if weight is next(iter(self.weights)):
            self._learn_of_groups()
        return super().gather(weight, scratch)

    def rebuild(self) -> None:
        """Call the constructor again, on the buffers that there are now; groups stay the same dictionaries."""
        optimizer, inner = self._optimizer, self.inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = [weight for weight, of in self.weights.items() if of == number]
            group |= {"step": self._steps[number]} if self._steps[number] else {}
        inner.state.clear()
        stand_in = SimpleNamespace(param_groups=inner.param_groups, state_dict=dict, load_state_dict=id)
        buffers = {number: optimizer.model_chunks[0].buffers for number in optimizer.per_model_buffers}
        first, last = ([getattr(optimizer, name) for name in names] for names in (_GIVEN, _GIVEN_LAST))
        with torch.enable_grad():
            DistributedOptimizer.__init__(optimizer, stand_in, *first, buffers, *last)
        optimizer.optimizer, inner.param_groups = inner, stand_in.param_groups

    @property
    def _shards(self) -> list[Tensor]:
        return [shard for group in self.inner.param_groups for shard in group["params"]]

    def _learn_of_groups(self) -> None:
        """Note what only ranks with a part of a group know: its steps, where it counts them, and which weights it has.

        These are asked for once, while each has elements.
        """
        known, device = self._optimizer.model_param_group_index_map, next(iter(self.weights)).device
        steps = [int(group.get("step", 0)) for group in self.inner.param_groups]
        here = torch.tensor([*steps, *(known.get(weight, (-1,))[0] for weight in self.weights)], device=device)
        most = torch.stack(all_gather(here, self.replicas)).amax(0).tolist()
        self._steps, numbers = most[: len(steps)], dict(zip(self.weights, most[len(steps) :], strict=True))
        groups = vars(self._optimizer).setdefault(_GROUP_OF_EACH, numbers)
        self.weights = {weight: groups[weight] for weight in self.weights}
        if -1 in groups.values():
            raise ValueError("no replica has a part of some weight: make the optimizer with units at home")
