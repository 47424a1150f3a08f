"""What a balancer is made of: checked and built before training, each part only where the configuration needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, same_ranks, world_size
from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.config import BalanceConfig
from zeroresize.config_keys import MIGRATING_MODES, PRIORITY_MODES, PRUNING_MODES
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.start_checks import StartCheck, check_data_parallelism, check_optimizer
from zeroresize.convert import require_same_configuration
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import segments_of_layers, work_of_layers
from zeroresize.layers.weight_checks import is_flat_parameters, is_sharded, why_no_whole_weight
from zeroresize.measure import column_statistics
from zeroresize.measure.step_timer import LayerTimer
from zeroresize.migration.lender import Lender
from zeroresize.optim.freezing import ColumnFreezer
from zeroresize.optim.optimizers import not_stepped
from zeroresize.policy.columns.selector import ColumnSelector

Layers = Mapping[str, BalancedLinear]


def check_layers(
    model: nn.Module, layers: Layers, optimizer: Any, process_group: ProcessGroup, config: BalanceConfig
) -> None:
    """Check that a model's layers can be balanced over this group while this optimizer trains them.

    Raises:
        ValueError: if they are another group's, there are none, they have another balancer, were converted with another
            configuration, or the optimizer steps none of their weights; unless ``start_checks`` is off, also for what
            :mod:`zeroresize.control.start_checks` finds.
    """
    for name, layer in layers.items():
        if not same_ranks(layer.process_group, process_group):
            raise ValueError(f"layer {name} belongs to another process group: pass the one that convert was given")
    if group_size(process_group) == 1:
        return
    if not layers:
        raise ValueError("the model has no converted layers: call zeroresize.convert(model, ...) first")
    if any(layer.probes.holds(LayerTimer) for layer in layers.values()):
        raise ValueError("the model has another balancer: close() that one first")
    require_same_configuration(layers, config)
    weights = {name: layer.weight for name, layer in layers.items()}
    unknown = not_stepped(optimizer, weights)
    if unknown and len(unknown) == len(weights):
        raise ValueError(
            f"the optimizer does not step the weights of {', '.join(unknown[:4])}{', …' if unknown[4:] else ''}, nor "
            "any other layer's: make it from the parameters that the model has now"
        )
    check_optimizer(unknown, is_error=config.start_checks)
    if config.start_checks:
        check_data_parallelism(model, layers, process_group)


def check_weights(layers: Layers, config: BalanceConfig) -> None:
    """Check that the layers' weights are what ``config`` needs: something may have been put on them after converting.

    Raises:
        ValueError: naming the layer, what was found, and what is allowed.
    """
    needs_whole_weights = config.mode in (*PRIORITY_MODES, *MIGRATING_MODES) or config.pruned_update == "freeze"
    for name, layer in layers.items():
        gone = why_no_whole_weight(layer)
        if gone is not None:
            raise ValueError(
                f"layer {name} cannot be balanced: {gone}. Allowed are parameters [out, in]; of FSDP, fully_shard with "
                "mode='off' or 'zero-rd', and FullyShardedDataParallel with NO_SHARD and use_orig_params=True"
            )
        if is_sharded(layer.weight) and needs_whole_weights:
            raise ValueError(
                f"layer {name} has a {type(layer.weight).__name__} as its weight, as fully_shard makes it: between "
                f"forwards there are only shards of it. mode={config.mode!r}, pruned_update={config.pruned_update!r} "
                "needs it whole; allowed are mode='off' and 'zero-rd' with pruned_update='optimizer'"
            )
        if is_flat_parameters(layer.weight) and config.mode in MIGRATING_MODES:
            raise ValueError(
                f"layer {name} is wrapped in FullyShardedDataParallel, which puts another weight in its place in every "
                f"forward, and mode={config.mode!r} sends the weight ahead; allowed are the modes that do not migrate"
            )


def clear_layers(layers: Layers, config: BalanceConfig) -> None:
    """Take from the layers what a balancer left that was dropped without being closed."""
    remembers = config.imputation == "same" and config.mode in PRUNING_MODES
    for layer in layers.values():
        layer.plan = layer.loans = layer.watch_input = layer.watch_forward = None
        layer.last = LastGradients() if remembers else None
        # From the first backward on, not from the first loan.
        layer.needs_eager_autograd = config.mode in MIGRATING_MODES


def meet(config: BalanceConfig, layers: Layers, process_group: ProcessGroup) -> Exchange | None:
    """Join the other ranks for exchanging numbers, once all agree on what they will do; None where there are none.

    Raises:
        ValueError: if they do not agree.
    """
    if group_size(process_group) == 1:
        return None
    agreement = {key: repr(value) for key, value in config.to_dict().items()}
    agreement["converted layers"] = ", ".join(layers)
    return Exchange(CpuGroup(process_group, agreement))


def build_start_check(
    config: BalanceConfig, model: nn.Module, layers: Layers, process_group: ProcessGroup, exchange: Exchange | None
) -> StartCheck | None:
    """What compares the ranks' parameters when training begins."""
    if not config.start_checks or exchange is None:
        return None
    return StartCheck(model, layers, process_group, exchange)


def build_forward_watch(config: BalanceConfig, layers: Layers, exchange: Exchange | None) -> ForwardWatch | None:
    """What watches the layers' forwards, where there are other ranks."""
    return ForwardWatch(layers, exchange, compares=config.start_checks) if exchange is not None else None


def build_selector(config: BalanceConfig, layers: Layers, rank: int) -> ColumnSelector:
    """What chooses ``rank``'s columns."""
    return ColumnSelector(
        config,
        rank,
        num_columns={name: layer.num_columns for name, layer in layers.items()},
        costs=work_of_layers(layers),
        segments=segments_of_layers(layers),
    )


def build_freezer(
    config: BalanceConfig, layers: Layers, optimizer: Any, process_group: ProcessGroup
) -> ColumnFreezer | None:
    """What keeps the optimizer off pruned columns.

    Raises:
        ValueError: if there are ranks outside the group.
    """
    num_ranks = group_size(process_group)
    if config.pruned_update != "freeze" or config.mode not in PRUNING_MODES or num_ranks == 1:
        return None
    if world_size() > num_ranks:
        raise ValueError(
            f"pruned_update='freeze' needs a tensor-parallel group of all {world_size()} ranks, this one has "
            f"{num_ranks}: if the others are data-parallel replicas, what each freezes lets them drift apart"
        )
    return ColumnFreezer(layers, optimizer)


def build_statistic(config: BalanceConfig, layers: Layers, optimizer: Any) -> column_statistics.ColumnStatistic | None:
    """What tells the columns' importance."""
    is_needed = config.mode in PRIORITY_MODES and layers
    return column_statistics.build_statistic(config, layers, optimizer) if is_needed else None


def build_lender(config: BalanceConfig, layers: Layers, process_group: ProcessGroup) -> Lender | None:
    """What carries out loans."""
    if config.mode not in MIGRATING_MODES or group_size(process_group) == 1:
        return None
    return Lender(layers, process_group, config.migration_transport, is_forced=config.forced_ratio is not None)
