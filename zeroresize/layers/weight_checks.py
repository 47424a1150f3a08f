"""Which parameters are what balancing needs, and which are one rank's shards of larger ones, of which process group.

A layer's weight must be a parameter [N, K] of its own that is never replaced.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, same_ranks
from zeroresize.layers.local_parts import why_not_plain
from zeroresize.utils.torch_private import is_flat_parameter, is_tensor_of_tensors, parameters_of

#: Layers tell what their parameters are: a mark on a parameter would be lost by a copy, and keep it from being pickled.
_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def why_no_whole_weight(layer: Any) -> str | None:
    """Tell why the layer has no weight parameter of its own; None if it has one."""
    weight = parameters_of(layer).get("weight")
    if weight is None:
        return (
            "its weight is no parameter: something makes it anew in every forward, as parametrizations, weight_norm "
            "and pruning do, or holds it elsewhere, as FullyShardedDataParallel does"
        )
    if type(weight).__name__ == "ColoParameter":
        return (
            "its weight is a ColoParameter, as Colossal-AI's GeminiPlugin (in chunks), overlap_allgather=True and "
            "use_fp8=True make it: it is filled, or cast, only for operations of torch"
        )
    if hasattr(weight, "ds_id"):
        return "DeepSpeed's ZeRO-3 shards its weight, of which a rank holds nothing between forwards: use a lower stage"
    if is_flat_parameter(weight) and weight.dim() != 2:
        return "FullyShardedDataParallel flattens and shards its weight"
    return None if (why := why_not_plain(weight)) is None else f"its weight is {why}"


def is_sharded_in(owner: Any, parameter: Tensor) -> bool:
    """Tell whether a rank holds only a shard of its part of a module's parameter between forwards."""
    ask = getattr(owner, "is_sharded_further", None)
    return is_tensor_of_tensors(parameter) if ask is None else bool(ask(parameter))


def is_wrapped_by_fsdp(module: nn.Module) -> bool:
    """Return whether ``FullyShardedDataParallel`` or ``fully_shard`` has a module, without importing them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel | fsdp.FSDPModule)


def tell_shards_of(layer: Any) -> None:
    """Make the parameters of a parallel linear layer known from now on, whichever it has at the time."""
    _layers.add(layer)


def is_marked_as_shard(parameter: Tensor) -> bool:
    """Tell whether another framework marks ``parameter`` as a shard: Megatron, Colossal-AI, or a process group."""
    marks = getattr(parameter, "__dict__", {})
    return (
        hasattr(parameter, "dist_layout")
        or bool(marks.get("tensor_model_parallel"))
        or any(isinstance(value, ProcessGroup) for value in marks.values())
    )


def known_layers() -> list[Any]:
    """Return the layers of the process that tell which of their parameters are shards."""
    return list(_layers)


def sharding_of(parameters: Sequence[Tensor]) -> tuple[ProcessGroup | None, list[bool]]:
    """Return the tensor-parallel group that ``parameters`` are divided over, and of each whether it is a shard."""
    known = {id(parameter): (layer.process_group, is_shard) for layer in _layers for parameter, is_shard in _of(layer)}
    group: ProcessGroup | None = None
    are_shards = []
    for parameter in parameters:
        of_parameter, is_shard = known.get(id(parameter), (None, False))
        group = group or of_parameter
        if group is not None and of_parameter is not None and not same_ranks(group, of_parameter):
            raise ValueError(
                f"parameters are of layers of several process groups, of ranks {group_ranks(group)} and "
                f"{group_ranks(of_parameter)}: one tensor-parallel group is allowed"
            )
        are_shards.append(is_shard or (of_parameter is None and is_marked_as_shard(parameter)))
    if group is None and any(are_shards):
        raise ValueError(
            f"{sum(are_shards)} of {len(parameters)} parameters are marked as shards, but none is of a parallel layer "
            "of zeroresize's, which would tell of which process group: convert the model before, or use the clipping "
            "of the framework that divided it"
        )
    return group, are_shards


def _of(layer: Any) -> Iterable[tuple[Tensor, bool]]:
    for name, parameter in layer.named_parameters():  # "parametrizations.bias.original" where it is parametrized
        # The norm of a DTensor is that of all ranks.
        is_shard = layer.is_column_parallel or "bias" not in name.split(".")
        is_shard = name in layer.unit_dims if layer.moves_only else is_shard
        yield parameter, is_shard and not layer.has_dtensors
    yield from ((getattr(owner, name), True) for owner, name, *_ in layer.extra)
