"""DistributedDataParallel around parameters that change their shapes: its reducer is dropped before and built anew.

It also tells which ranks hold the same shards, and so must move alike.

A reducer's buckets have fixed shapes, and its hooks hold on to gradient accumulators, which remember a shape, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, group_size, require_group, world_size
from zeroresize.comm.exchange import Meet
from zeroresize.integrations.replicas import Reducer, ShardedOptimizer, WholeOptimizer
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.optim.optimizers import SHARDED, kinds_of, with_inner
from zeroresize.resharding.agreement import agreed, allocate_together, require_same
from zeroresize.resharding.fully_sharded import FullySharded, fully_sharded_in
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_private import drop_reducer_of_ddp, rebuild_ddp, why_ddp_cannot_be_rebuilt

_MEGATRONS = "megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"
#: Wrappers of hosts that have one of their own, by module and name, and where its ``ReducerOfDdp`` is.
_HOSTS = {
    _MEGATRONS: "zeroresize.integrations.megatron_buffers",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "zeroresize.integrations.deepspeed",
}
#: What each wrapper has once it is made.
_WHEN_MADE = {"reducer", "bucket_groups", "seq_data_parallel_group"}
#: What was found around models; modules hash by identity.
_around: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


class ReducerOfDdp(Reducer):
    """The reducer of torch's DistributedDataParallel, whose buckets are made in the next backward."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper, self.process_group = wrapper, wrapper.process_group

    def averaged(self) -> Iterable[Tensor]:
        ignored = self._wrapper.parameters_to_ignore
        return [each for name, each in self._wrapper.module.named_parameters() if name not in ignored]

    def why_not_rebuilt(self) -> str | None:
        return why_ddp_cannot_be_rebuilt(self._wrapper)

    def drop(self) -> None:
        drop_reducer_of_ddp(self._wrapper)

    def rebuild(self) -> None:
        rebuild_ddp(self._wrapper)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside Booster's, DDP's or DeepSpeed's wrappers, so that layer names do not depend on them."""
    inner = getattr(model, "unwrap", None)
    model = inner() if callable(inner) else model
    unwrapped: nn.Module = model.module if isinstance(model, tuple(_kinds())) else model  # type: ignore[assignment]
    return unwrapped


def _kinds() -> dict[Any, str]:
    """The DistributedDataParallel of torch and those of hosts in use, with the modules of their ``ReducerOfDdp``."""
    hosts = {getattr(sys.modules.get(module), name, None): where for (module, name), where in _HOSTS.items()}
    return {DistributedDataParallel: __name__, **{kind: where for kind, where in hosts.items() if kind is not None}}


def reducers_of(model: nn.Module) -> list[Reducer]:
    """Return what averages gradients in ``model``, and around it or a part of it."""
    kinds, wrappers = _kinds(), wrappers_of(model)
    modules = [next(name for kind, name in kinds.items() if isinstance(wrapper, kind)) for wrapper in wrappers]
    return [importlib.import_module(name).ReducerOfDdp(each) for name, each in zip(modules, wrappers, strict=True)]


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
    optimizer: Any = None,
) -> DataParallelReplicas:
    """Return who else holds the shards of ``layers``: as the user says, or whom DDP, FSDP2 or ZeRO averages over.

    Args:
        process_group: the tensor-parallel group; a job without ranks outside of it has no replicas.
        data_parallel_group: as the user says; None to find out.
        optimizer: steps the layers.
    """
    num_ranks = group_size(process_group)
    if data_parallel_group is None and world_size() <= num_ranks:
        return DataParallelReplicas()
    gc.collect()  # a wrapper that was let go of is around the model until then
    around = _groups_around(layers, reducers_of(model), fully_sharded_in(model), sharded_optimizer(optimizer))
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
                f"data_parallel_group holds ranks {list(ranks)} of the job, but DistributedDataParallel, or "
                f"fully_shard, around the layers averages over {sorted(map(list, groups))}"
            )
        return DataParallelReplicas(data_parallel_group if len(ranks) > 1 else None)
    situation = f"there are {world_size()} ranks, {num_ranks} of them in this tensor-parallel group"
    if not all(around):
        return DataParallelReplicas(
            why_unknown=f"{situation}, and no DistributedDataParallel or fully_shard around all layers tells "
            "which of the others hold the same shards and must own the same units: pass data_parallel_group to the "
            "Balancer, or wrap the model first"
        )
    if len(groups) > 1:
        return DataParallelReplicas(
            why_unknown=f"{situation}, and several DistributedDataParallel around the layers average over different "
            f"ones, {sorted(map(list, groups))}"
        )
    (group,) = groups.values()
    return DataParallelReplicas(group if group_size(group) > 1 else None)


def _groups_around(
    layers: Mapping[str, BalancedLinear],
    reducers: Sequence[Reducer],
    sharded: Mapping[int, FullySharded],
    in_parts: ShardedOptimizer | None,
) -> list[dict[tuple[int, ...], ProcessGroup]]:
    """For every layer the groups, by their ranks, over which the gradient of its weight is averaged."""
    averaged = [(reducer.process_group, set(map(id, reducer.averaged()))) for reducer in reducers]
    averaged += [(each.group, {key}) for key, each in sharded.items() if each.group is not None]
    if not reducers and in_parts is not None and in_parts.replicas is not None:
        averaged.append((in_parts.replicas, set(map(id, in_parts.weights))))
    return [
        {tuple(group_ranks(group)): group for group, parameters in averaged if id(layer.weight) in parameters}
        for layer in layers.values()
    ]


def wrappers_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the DistributedDataParallel modules in ``model``, and around it or a part of it.

    The ones around it are found by looking at all objects of this process, which takes hundredths of a second, until
    some are found.
    """
    within = [module for module in model.modules() if isinstance(module, tuple(_kinds()))]
    if not _around.get(model):  # it may be wrapped later than it was looked at first
        _around[model] = weakref.WeakSet(_found_around(model))
    return (*within, *(wrapper for wrapper in _around[model] if not any(wrapper is one for one in within)))


def _found_around(model: nn.Module) -> list[nn.Module]:
    parts = set(map(id, model.modules()))
    # Not isinstance(): some objects' __class__ is computed, with side effects. Nor issubclass() of each object: it asks
    # abstract classes, which takes longer than many a move.
    kinds = set[type]().union(*map(_with_subclasses, _kinds()))
    everything = gc.get_objects()
    if kinds.isdisjoint(map(type, everything)):
        return []
    wrappers: list[Any] = [one for one in everything if type(one) in kinds]
    made = [wrapper for wrapper in wrappers if vars(wrapper).keys() & _WHEN_MADE]
    return [wrapper for wrapper in made if parts & set(map(id, wrapper.module.modules()))]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def require_rebuildable(reducers: Sequence[Reducer]) -> None:
    """Raise RuntimeError for a reducer that cannot be made anew, saying why."""
    for reducer in reducers:
        if (reason := reducer.why_not_rebuilt()) is not None:
            raise RuntimeError(
                "parameters inside a wrapper of data parallelism cannot change their shapes, since its buffers cannot "
                f"be made anew: {reason}"
            )


def sharded_optimizer(optimizer: Any) -> ShardedOptimizer | None:
    """Return what takes a sharded optimizer apart; None for one that is whole, or not known."""
    try:
        kinds = [(each, SHARDED.get(kind)) for each in with_inner(optimizer) for kind in kinds_of(each)]
    except ValueError:  # several optimizers
        return None
    return next((resolve_name(where)(each) for each, where in kinds if where is not None), None)


def gathered(sharded: ShardedOptimizer, meet: Meet) -> WholeOptimizer:
    """Return the whole of a sharded optimizer, for which the memory of CPUs is enough; collective.

    Raises:
        ValueError, CannotMoveError, NotEnoughMemoryError, RuntimeError: as a move, on all ranks; nothing has changed.
    """

    def describe() -> float:
        if (why := sharded.why_not()) is not None:
            raise ValueError(f"units cannot move with this optimizer: {why}")
        return fingerprint(json.dumps(sharded.describe()))

    _, table = agreed(meet, describe, lambda number: (number, 0.0), what="what the optimizer keeps", moves=True)
    require_same([number for number, *_ in table], "what the optimizer keeps", meet, moves=True)
    needed = sum(weight.numel() * sharded.bytes_of_element(weight) for weight in sharded.weights)
    largest = max(each.numel() * max(each.itemsize, torch.float32.itemsize) for each in sharded.weights)
    device = next(iter(sharded.weights)).device
    scratch, what = list[Tensor](), "the whole state of the optimizer"
    allocate_together(needed, torch.device("cpu"), lambda: None, meet, what)
    allocate_together(
        largest, device, lambda: scratch.append(torch.empty(largest, dtype=torch.uint8, device=device)), meet, what
    )
    return agreed(meet, lambda: WholeOptimizer(sharded, *scratch), what=what, moves=True)[0]
