"""What a balancer is given, checked before anything is attached, and its layers made ready.

DDP over the tensor-parallel group averages shards that belong to different columns; an optimizer of some layers leaves
the others as they are. Neither fails by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import as_process_group, group_rank, group_ranks, group_size, same_ranks
from zeroresize.comm.groups import let_others_fail
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES, MOVABLE_MODES, PRIORITY_MODES, PRUNING_MODES
from zeroresize.conversion import balanced_layers, convert, group_of
from zeroresize.integrations.known_faults import warn_of_known_faults
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import all_segments
from zeroresize.layers.weight_checks import why_no_whole_weight
from zeroresize.measure.step_timer import LayerTimer
from zeroresize.optim.optimizers import kinds_of, not_stepped
from zeroresize.resharding.data_parallel import ReducerOfDdp, unwrap
from zeroresize.resharding.segments.divided_lora import divide_lora
from zeroresize.resharding.segments.search_segments import first_of
from zeroresize.utils.torch_private import is_flat_parameter, running_ddp

logger = logging.getLogger(__name__)

Layers = Mapping[str, BalancedLinear]

#: So many of what is wrong an error names.
MOST_NAMED = 4
HINT = "start_checks=False in the configuration turns this check off"


@dataclass(frozen=True)
class Setup:
    """Holds what a user gave to a balancer, once it is checked as far as that needs no other rank."""

    model: nn.Module
    layers: Layers
    optimizer: Any
    config: BalanceConfig
    process_group: ProcessGroup  # the tensor-parallel one
    replicas_group: ProcessGroup | None  # the data-parallel one that the user gave

    @cached_property
    def rank(self) -> int:
        """The rank of this process within the tensor-parallel group."""
        return group_rank(self.process_group)

    @cached_property
    def num_ranks(self) -> int:
        """The size of the tensor-parallel group."""
        return group_size(self.process_group)

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        return next(iter(self.layers.values())).local_weight.device

    @property
    def may_lend(self) -> bool:
        """Whether ranks may compute for others, by the mode and by all layers."""
        return self.config.mode in MIGRATING_MODES and all(layer.may_lend for layer in self.layers.values())

    @property
    def are_divided(self) -> bool:
        """Whether units are away from home, or will be as soon as ``config.shares`` divide them."""
        segments, shares = all_segments(self.layers), self.config.shares
        is_uneven = shares == "auto" if isinstance(shares, str) else len(set(shares)) > 1
        is_uneven = is_uneven or self.config.memory_limits is not None
        will_be = is_uneven and not any(segment.has_given_shares for segment in segments)
        return will_be or any(len(set(segment.shares)) > 1 or not segment.owned.is_home for segment in segments)

    @property
    def may_be_away(self) -> bool:
        """Whether units may be away from home at any time."""
        return self.config.mode in MOVABLE_MODES or self.are_divided


def checked_setup(
    model: nn.Module,
    optimizer: Any,
    config: BalanceConfig,
    process_group: ProcessGroup | DeviceMesh | None,
    data_parallel_group: ProcessGroup | DeviceMesh | None,
) -> Setup:
    """Convert the model if it was not converted, and check all that needs no other rank; ValueError as a balancer's."""
    process_group = group_of(model, process_group)
    replicas_group: ProcessGroup | None = as_process_group(data_parallel_group)
    config.validate_group_size(group_size(process_group))
    layers = balanced_layers(model)
    if not layers or not all(layer.is_searched for layer in layers.values()):
        convert(model, process_group)
        layers = balanced_layers(model)
    divide_lora(unwrap(model))  # an error where an adapter came after convert
    _check_weights(layers, config)
    _check_layers(model, layers, optimizer, process_group, config)
    if group_rank(process_group) == 0:
        warn_of_known_faults(unwrap(model), optimizer)
    return Setup(model, layers, optimizer, config, process_group, replicas_group)


def tell_other_ranks(model: nn.Module, process_group: ProcessGroup | DeviceMesh | None, error: Exception) -> None:
    """Tell the ranks of the group, which would wait for this one, what :func:`checked_setup` raised; not collective."""
    with suppress(Exception):  # nothing tells of which group this rank is
        try:
            group = group_of(model, process_group)
        except Exception:  # it may be just this that is wrong
            group = group_of(model)
        if group_size(group) > 1:
            let_others_fail(group, error)


def prepare_layers(setup: Setup) -> None:
    """Take from the layers what a balancer left that was dropped without being closed, and give what this one needs."""
    release_layers(setup)
    config = setup.config
    remembers = config.paper.imputation == "same" and config.mode in PRUNING_MODES
    for layer in setup.layers.values():
        layer.last = LastGradients() if remembers else None
        # From the first backward on, not from the first loan.
        layer.needs_eager_autograd = setup.may_lend


def release_layers(setup: Setup) -> None:
    """Let the layers compute without a balancer."""
    for layer in setup.layers.values():
        layer.plan = layer.loans = layer.last = layer.watch_input = layer.watch_forward = None
        layer.needs_eager_autograd = False


def warn_of_layers_that_stay(setup: Setup) -> None:
    """Log, on rank 0, the layers whose units cannot move although the configuration lets units move."""
    layers = setup.layers
    staying = {
        name: layer.stays_even if layer.segment is None else layer.segment.stays_even
        for name, layer in layers.items()
        if layer.segment is None or layer.segment.stays_even is not None
    }
    if staying and setup.config.may_move and setup.rank == 0:
        (name, reason), num = next(iter(staying.items())), len(staying)
        logger.warning("units of %d of %d layers stay on a slow rank; the first is %s", num, len(layers), name)
        logger.warning("%s stays even: %s", name, reason)


def _check_weights(layers: Layers, config: BalanceConfig) -> None:
    """Check that the layers' weights are what ``config`` needs: something may have been put on them since."""
    # "exact" can do without lending
    needs_whole_weights = config.mode in (*PRIORITY_MODES, "mig") or config.pruned_update == "freeze"
    needs_own_parameter = (
        config.mode in ("mig", "semi")
        or config.pruned_update == "freeze"
        or (config.mode in PRIORITY_MODES and config.priority == "path_length")
    )
    for name, layer in layers.items():
        if layer.moves_only and config.mode not in ("off", "exact"):
            raise ValueError(
                f"layer {name} ({type(layer).__name__}) computes by its host's own forward, of which no columns can be "
                f"lent or dropped, as mode={config.mode!r} does: allowed are mode='exact' and 'off', in which units "
                "move, or leave it out by module_filter_fn of convert"
            )
        if layer.moves_only:
            continue
        gone = why_no_whole_weight(layer)
        if gone is not None:
            raise ValueError(
                f"layer {name} cannot be balanced: {gone}. Allowed are parameters [out, in]; of FSDP, fully_shard with "
                "mode='off', 'exact' or 'zero-rd', and FullyShardedDataParallel with NO_SHARD and use_orig_params=True"
            )
        if layer.is_sharded_further(layer.weight) and needs_whole_weights:
            raise ValueError(
                f"layer {name} has a {type(layer.weight).__name__} as its weight, as fully_shard makes it: "
                f"between forwards there are only shards of it. mode={config.mode!r}, "
                f"pruned_update={config.pruned_update!r} needs it whole; allowed are mode='off', 'exact' and "
                "'zero-rd' with pruned_update='optimizer'"
            )
        if needs_own_parameter and not layer.may_lend:
            raise ValueError(
                f"layer {name} multiplies by a local_weight that is not its parameter: mode={config.mode!r}, "
                f"priority={config.priority!r}, pruned_update={config.pruned_update!r} need the parameter itself; "
                "allowed are the modes that do not migrate, other priorities than 'path_length', and "
                "pruned_update='optimizer'"
            )
        if is_flat_parameter(layer.weight) and config.mode in MIGRATING_MODES:
            raise ValueError(
                f"layer {name} is wrapped in FullyShardedDataParallel, which replaces its weight in every forward; "
                f"mode={config.mode!r} sends the weight before that; allowed are the modes that do not migrate"
            )


def _check_layers(
    model: nn.Module, layers: Layers, optimizer: Any, process_group: ProcessGroup, config: BalanceConfig
) -> None:
    """Check that a model's layers can be balanced over this group while this optimizer trains them.

    Raises:
        ValueError: if they are another group's, they have another balancer, or the optimizer steps none of their
            weights; unless ``start_checks`` is off, also if it leaves out some that want gradients, or for what
            :func:`check_data_parallelism` finds.
    """
    for name, layer in layers.items():
        if not same_ranks(layer.process_group, process_group):
            raise ValueError(f"layer {name} belongs to another process group: pass the one that convert was given")
    if group_size(process_group) == 1:
        return
    if any(layer.probes.holds(LayerTimer) for layer in layers.values()):
        raise ValueError("the model has another balancer: close() that one first")
    if not hasattr(optimizer, "param_groups") and not hasattr(optimizer, "optim"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which has no parameters to step: pass the torch optimizer, or "
            "the host's wrapper of it"
        )
    weights = {name: layer.weight for name, layer in layers.items()}
    unknown = not_stepped(optimizer, weights)
    if unknown and len(unknown) == len(weights):
        raise ValueError(
            f"the optimizer does not step the weights of {first_of(unknown)}, nor any other layer's: make it from the "
            "parameters that the model has now"
        )
    if unknown:
        message = (
            f"the optimizer does not step the weights of {first_of(unknown)}, which want gradients: was it made before "
            "they were?"
        )
        if config.start_checks:
            raise ValueError(
                f"{message} Freeze them (requires_grad_(False)) where that is meant; where another optimizer steps "
                f"them, {HINT}"
            )
        logger.warning("%s", message)
    zero = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    if ("torch", "ZeroRedundancyOptimizer") in kinds_of(zero):
        shared = sorted({*group_ranks(zero.process_group)} & {*group_ranks(process_group)})
        if len(shared) > 1:
            raise ValueError(
                f"ZeroRedundancyOptimizer gives ranks {shared} of the job each other's weights, which hold different "
                "shards of the layers: give it the data-parallel group (process_group=...)"
            )
    if config.start_checks:
        check_data_parallelism(model, layers, process_group)


def check_data_parallelism(model: nn.Module, layers: Layers, process_group: ProcessGroup) -> None:
    """Check that no DistributedDataParallel around ``layers`` averages over ranks that hold different shards."""
    for module in (*model.modules(), running_ddp()):
        if not isinstance(module, DistributedDataParallel):
            continue
        shared = sorted(set(group_ranks(module.process_group)) & set(group_ranks(process_group)))
        averaged = {id(each) for each in ReducerOfDdp(module).averaged() if each.requires_grad}
        if len(shared) > 1 and any(id(layer.weight) in averaged for layer in layers.values()):
            raise ValueError(
                f"DistributedDataParallel averages gradients over ranks {shared} of the job, which hold different "
                "shards of the layers: give it the data-parallel group (process_group=...), whose ranks hold the same "
                f"shards, or leave it away where there is no data parallelism; {HINT}"
            )
