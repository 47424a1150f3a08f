"""Which parameters are one rank's shards of larger ones, and of which process group."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, same_ranks

#: Layers tell what their parameters are: a mark on a parameter would be lost by a copy, and keep it from being pickled.
_layers: weakref.WeakSet[Any] = weakref.WeakSet()


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


def sharding_of(parameters: Sequence[Tensor]) -> tuple[ProcessGroup | None, list[bool]]:
    """Return the tensor-parallel group that ``parameters`` are divided over, and of each whether it is a shard.

    Shards are the parameters of balanced layers, but for a row-parallel layer's bias, and what is marked as one.

    Returns:
        (None if there is no balanced layer's parameter among them, one flag for each).

    Raises:
        ValueError: if layers of different groups are among them, or shards and no layer that tells of which group.
    """
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
        yield parameter, is_shard and not layer.has_dtensors
