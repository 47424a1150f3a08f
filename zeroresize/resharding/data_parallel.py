"""DistributedDataParallel around parameters that change their shapes: its reducer is dropped before and built anew.

It also tells which ranks hold the same shards, and so must move alike.

A reducer's buckets have fixed shapes, and its hooks hold on to gradient accumulators, which remember a shape, too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, group_size, require_group, world_size
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.torch_private import why_ddp_cannot_be_rebuilt

#: What was found around models; modules hash by identity.
_around: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[DistributedDataParallel]] = weakref.WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside Booster's or DDP's wrappers, so that layer names do not depend on them."""
    inner = getattr(model, "unwrap", None)
    model = inner() if callable(inner) else model
    return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass(frozen=True)
class DataParallelReplicas:
    """Tells which ranks hold the same shards as this one.

    Attributes:
        group: the ranks that do, this one included; None where nobody else does, or that is not known.
        why_unknown: None where it is known.
    """

    group: ProcessGroup | None = None
    why_unknown: str | None = None


def replicas_of(
    model: nn.Module,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    data_parallel_group: ProcessGroup | None,
) -> DataParallelReplicas:
    """Return who else holds the shards of ``layers``: as the user says, or whom DDP around them averages over.

    Args:
        process_group: the tensor-parallel group; a job without ranks outside of it has no replicas.
        data_parallel_group: as the user says; None to find out.
    """
    num_ranks = group_size(process_group)
    if data_parallel_group is None and world_size() <= num_ranks:
        return DataParallelReplicas()
    gc.collect()  # a wrapper that was let go of is around the model until then
    around = _groups_around(layers, wrappers_of(model))
    groups = {ranks: group for own in around for ranks, group in own.items()}
    if data_parallel_group is not None:
        ranks = tuple(group_ranks(require_group(data_parallel_group)))
        if len(set(ranks) & set(group_ranks(process_group))) > 1:
            raise ValueError(
                f"data_parallel_group holds ranks {list(ranks)} of the job and process_group "
                f"{group_ranks(process_group)}: they may have this rank in common only, as ranks of one "
                "tensor-parallel group hold different shards"
            )
        if groups and set(groups) != {ranks}:
            raise ValueError(
                f"data_parallel_group holds ranks {list(ranks)} of the job, but DistributedDataParallel around the "
                f"layers averages over {sorted(map(list, groups))}"
            )
        return DataParallelReplicas(data_parallel_group if len(ranks) > 1 else None)
    situation = f"there are {world_size()} ranks, {num_ranks} of them in this tensor-parallel group"
    if not all(around):
        return DataParallelReplicas(
            why_unknown=f"{situation}, and no DistributedDataParallel around all layers tells which of the others hold "
            "the same shards and must own the same units: pass data_parallel_group to the Balancer, or wrap the model "
            "first"
        )
    if len(groups) > 1:
        return DataParallelReplicas(
            why_unknown=f"{situation}, and several DistributedDataParallel around the layers average over different "
            f"ones, {sorted(map(list, groups))}"
        )
    (group,) = groups.values()
    return DataParallelReplicas(group if group_size(group) > 1 else None)


def _groups_around(
    layers: Mapping[str, BalancedLinear], wrappers: Sequence[DistributedDataParallel]
) -> list[dict[tuple[int, ...], ProcessGroup]]:
    """For every layer the groups, by their ranks, over which wrappers average the gradient of its weight."""
    averaged = [
        (
            wrapper.process_group,
            {id(one) for name, one in wrapper.module.named_parameters() if name not in wrapper.parameters_to_ignore},
        )
        for wrapper in wrappers
    ]
    return [
        {tuple(group_ranks(group)): group for group, parameters in averaged if id(layer.weight) in parameters}
        for layer in layers.values()
    ]


def wrappers_of(model: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """Return the DistributedDataParallel modules in ``model``, and around it or a part of it.

    The ones around it are found by looking at all objects of this process, which takes hundredths of a second, until
    some are found.
    """
    within = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not _around.get(model):  # it may be wrapped later than it was looked at first
        _around[model] = weakref.WeakSet(_found_around(model))
    return (*within, *(wrapper for wrapper in _around[model] if not any(wrapper is one for one in within)))


def _found_around(model: nn.Module) -> list[DistributedDataParallel]:
    parts = set(map(id, model.modules()))
    # Not isinstance(): some objects' __class__ is computed, with side effects. Nor issubclass() of each object: it asks
    # abstract classes, which takes longer than many a move.
    kinds = _with_subclasses(DistributedDataParallel)
    everything = gc.get_objects()
    if kinds.isdisjoint(map(type, everything)):
        return []
    wrappers: list[Any] = [one for one in everything if type(one) in kinds]
    return [one for one in wrappers if "reducer" in vars(one) and parts & set(map(id, one.module.modules()))]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def require_rebuildable(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise RuntimeError for a wrapper whose reducer cannot be built anew, saying why."""
    for wrapper in wrappers:
        reason = why_ddp_cannot_be_rebuilt(wrapper)
        if reason is not None:
            raise RuntimeError(
                f"parameters inside a {type(wrapper).__name__} cannot change their shapes, since its reducer cannot be "
                f"built anew: {reason}"
            )
