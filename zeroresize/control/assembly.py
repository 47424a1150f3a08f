"""What a balancer is made of: :func:`build` checks and makes it, each part only where the configuration needs it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import as_process_group, group_rank, group_size, world_size
from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.meeting import Meet
from zeroresize.comm.replicas import ranks_with_replicas
from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import AWAY_MODES, MIGRATING_MODES, MOVING_MODES, PRIORITY_MODES, PRUNING_MODES
from zeroresize.control.dropout_keys import DropoutKeys
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.optimizer_steps import OptimizerSteps
from zeroresize.control.plan_in_force import PlanInForce
from zeroresize.control.plan_installer import LineageTable, PlanInstaller
from zeroresize.control.setup_checks import Layers, check_layers, check_weights
from zeroresize.control.start_checks import StartCheck
from zeroresize.convert import balanced_layers, convert, group_of
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import owned_segments, segments_of_layers, work_of_layers
from zeroresize.measure.column_statistics import build_statistic
from zeroresize.measure.device_speed import measure_wanted_shares
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.measure.restartable_statistic import RestartableStatistic
from zeroresize.migration.lender import Lender
from zeroresize.optim.freezing import ColumnFreezer
from zeroresize.plan.ownership import checked_shares
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.resharding.agreement import MeetReplicas
from zeroresize.resharding.data_parallel import replicas_of
from zeroresize.resharding.initial_division import divide_units, require_segments
from zeroresize.resharding.same_segments import require_same_segments
from zeroresize.resharding.search_segments import first_of
from zeroresize.resharding.state_dicts import guard_optimizer
from zeroresize.resharding.units_in_force import UnitsInForce

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a balancer is made of, on one rank; None for what its mode, or a group of one rank, does not need.

    Attributes:
        config: how to balance.
        process_group: the tensor-parallel group, of ``num_ranks``; this process is ``rank`` in it.
        layers: balanced layers by name, in the order of the model.
        lineage: which of their columns are pruned.
        where: this rank is, for the other ranks and for what errors tell.
        exchange: of numbers with the other ranks.
        exchange_of_replicas: with those that decide and move alike: data-parallel replicas, too, where units may move.
            Without replicas it is ``exchange``.
        start_check: compares the ranks' parameters when training begins.
        forward_watch: compares the ranks' batches, and notices where no step is called.
        optimizer_steps: counts the optimizer's steps, and notices where another one steps.
        monitor: measures this rank's steps.
        statistic: tells the columns' importance.
        decision: the group's, from exchanged numbers to a plan.
        selector: which columns a share is.
        plan_in_force: carries out a plan.
        lender: carries out its loans.
        freezer: keeps the optimizer off pruned columns.
        units: which units this rank owns; None in a group of one.
        attached: takes back what all of them attached to the layers, the optimizer and the group, the last one first.
    """

    config: BalanceConfig
    process_group: ProcessGroup
    rank: int
    num_ranks: int
    layers: Layers
    lineage: LineageTable
    where: Whereabouts
    exchange: Exchange | None
    exchange_of_replicas: Exchange | None
    start_check: StartCheck | None
    forward_watch: ForwardWatch | None
    optimizer_steps: OptimizerSteps | None
    monitor: RankMonitor
    statistic: RestartableStatistic | None
    decision: GroupDecision
    selector: ColumnSelector
    plan_in_force: PlanInForce
    lender: Lender | None
    freezer: ColumnFreezer | None
    units: UnitsInForce | None
    attached: ExitStack

    @property
    def device(self) -> torch.device:
        """Of the layers."""
        return next(iter(self.layers.values())).local_weight.device

    def close(self) -> None:
        """Take back all that is attached, whatever fails; afterwards the layers compute in full.

        Raises:
            RuntimeError: if what was lent cannot be taken back.
        """
        self.attached.close()


def build(
    model: nn.Module,
    optimizer: Any,
    config: BalanceConfig,
    process_group: ProcessGroup | DeviceMesh | None = None,
    data_parallel_group: ProcessGroup | DeviceMesh | None = None,
) -> Parts:
    """Check what a balancer is given, and make its parts; collective over the tensor-parallel group, and over its
    data-parallel replicas where units may move.

    A model that was not converted is, and its units are divided by ``config.shares`` unless ``convert`` was told how.

    The order matters: what needs no other rank is checked before the ranks meet, and an optimizer calls hooks in the
    order in which they were made. Where something fails, what was attached until then is taken back.

    Raises:
        ValueError: as :class:`~zeroresize.balancer.Balancer` tells.
        RuntimeError: if not all ranks come within the time limit of ``process_group``.
    """
    process_group = group_of(model, process_group)
    replicas_group: ProcessGroup | None = as_process_group(data_parallel_group)
    rank, num_ranks = group_rank(process_group), group_size(process_group)
    config.validate_group_size(num_ranks)
    layers = _converted_layers(model, process_group)
    check_weights(layers, config)
    check_layers(model, layers, optimizer, process_group, config)
    with ExitStack() as attached:
        _prepare_layers(layers, config)
        attached.callback(_release_layers, layers)
        exchange = of_replicas = start_check = forward_watch = optimizer_steps = lender = statistic = units = None
        if num_ranks > 1:
            _kept(DropoutKeys(model, layers, process_group, config), attached)
            _warn_of_what_stays(layers, config)
            exchange = of_replicas = _kept(_meet(config, layers, process_group), attached)
            replicas = replicas_of(model, layers, process_group, replicas_group)
            units = UnitsInForce(model, layers, optimizer, process_group, meet=exchange.meet, replicas=replicas)
            units.agree()
            if config.shares != "even" and not any(segment.has_given_shares for segment in units.segments):
                _divide_by_configuration(units, layers, process_group, config, exchange.meet)
            _tell_what_stays(units, config, rank)
            guard_optimizer(optimizer, units.are_away)  # also once the balancer is closed
            _require_home(units, config)
            if world_size() > num_ranks and config.mode in AWAY_MODES:
                group = replicas.group if units.why_not_movable is None else None
                of_replicas = _kept(_meet_replicas(config, layers, process_group, group, exchange), attached)
                if of_replicas is not exchange:
                    units.meet = MeetReplicas(of_replicas.meet, of_replicas.ranks)
        decision = _kept(_build_decision(config, num_ranks, of_replicas, units), attached)
        if exchange is not None and config.start_checks:
            start_check = _kept(StartCheck(model, layers, process_group, exchange), attached)
        # The freezer before the statistic, which so sees weights that were put back.
        freezer = _kept(_build_freezer(config, layers, optimizer, process_group), attached)
        if layers and config.mode in PRIORITY_MODES:
            statistic = RestartableStatistic(lambda: build_statistic(config, layers, optimizer))
            _kept(statistic, attached)
            if units is not None and not units.is_home:
                statistic.pause()
        is_forced = config.forced_ratio is not None
        if num_ranks > 1 and _may_lend(layers, config):
            lender = _kept(Lender(layers, process_group, config.migration_transport, is_forced=is_forced), attached)
        monitor = _kept(RankMonitor(layers, config), attached)
        if exchange is not None:
            optimizer_steps = _kept(OptimizerSteps(optimizer, exchange.where, layers), attached)
            if units is not None:
                units.checks.append(optimizer_steps.why_another_steps)
            groups = {id(layer.process_group): layer.process_group for layer in layers.values()}.values()
            watch = ForwardWatch(layers, exchange, compares=config.start_checks, groups=groups)
            forward_watch = _kept(watch, attached)
        selector = _build_selector(config, layers, rank)
        installer = PlanInstaller(layers, selector, config.paper.imputation)
        attached.callback(installer.clear)
        plan_in_force = PlanInForce(
            config,
            rank,
            num_ranks,
            selector=selector,
            installer=installer,
            lender=lender,
            exchange=exchange,
            units=units,
        )
        return Parts(
            config=config,
            process_group=process_group,
            rank=rank,
            num_ranks=num_ranks,
            layers=layers,
            lineage=LineageTable(layers),
            where=exchange.where if exchange is not None else Whereabouts(),
            exchange=exchange,
            exchange_of_replicas=of_replicas,
            start_check=start_check,
            forward_watch=forward_watch,
            optimizer_steps=optimizer_steps,
            monitor=monitor,
            statistic=statistic,
            decision=decision,
            selector=selector,
            plan_in_force=plan_in_force,
            lender=lender,
            freezer=freezer,
            units=units,
            attached=attached.pop_all(),
        )


def _converted_layers(model: nn.Module, process_group: ProcessGroup) -> Layers:
    """The layers that may be balanced; a model, or layers of it, that nobody has converted is converted."""
    layers = balanced_layers(model)
    if not layers or not all(layer.is_searched for layer in layers.values()):
        convert(model, process_group)
        layers = balanced_layers(model)
    return layers


def _divide_by_configuration(
    units: UnitsInForce, layers: Layers, process_group: ProcessGroup, config: BalanceConfig, meet: Meet
) -> None:
    """Divide the units by ``config.shares`` before the first step; collective."""
    device = next(iter(layers.values())).local_weight.device
    require_same_segments(units.segments, config.shares, None, process_group, device)
    require_segments(config.shares, units.segments)
    shares = measure_wanted_shares(config.shares, layers, process_group, meet)
    divide_units(units, checked_shares(shares, group_size(process_group)))


class _Closable(Protocol):
    @property
    def close(self) -> Any: ...


_Part = TypeVar("_Part", bound="_Closable | None")


def _kept(part: _Part, attached: ExitStack) -> _Part:
    """``part``, which is closed when what is attached is taken back."""
    if part is not None:
        attached.callback(part.close)
    return part


def _prepare_layers(layers: Layers, config: BalanceConfig) -> None:
    """Take from the layers what a balancer left that was dropped without being closed, and give what this one needs."""
    _release_layers(layers)
    remembers = config.paper.imputation == "same" and config.mode in PRUNING_MODES
    for layer in layers.values():
        layer.last = LastGradients() if remembers else None
        # From the first backward on, not from the first loan.
        layer.needs_eager_autograd = _may_lend(layers, config)


def _may_lend(layers: Layers, config: BalanceConfig) -> bool:
    return config.mode in MIGRATING_MODES and all(layer.may_lend for layer in layers.values())


def _release_layers(layers: Layers) -> None:
    """Let the layers compute without a balancer."""
    for layer in layers.values():
        layer.plan = layer.loans = layer.last = layer.watch_input = layer.watch_forward = None
        layer.needs_eager_autograd = False


def _meet(config: BalanceConfig, layers: Layers, process_group: ProcessGroup) -> Exchange:
    """Join the other ranks for exchanging numbers, once all agree on what they will do.

    Raises:
        ValueError: if they do not agree.
    """
    return Exchange(CpuGroup(process_group, _agreement(config, layers)))


def _meet_replicas(
    config: BalanceConfig,
    layers: Layers,
    process_group: ProcessGroup,
    data_parallel_group: ProcessGroup | None,
    exchange: Exchange,
) -> Exchange:
    """Join the ranks of all data-parallel replicas, too; where there are none, ``exchange`` itself.

    Raises:
        ValueError: if they do not agree on what they will do, or are no whole replicas.
    """
    ranks = ranks_with_replicas(process_group, data_parallel_group, exchange)
    if not ranks:
        return exchange
    group = CpuGroup(process_group, _agreement(config, layers), ranks, exchange.where)
    return Exchange(group, counts_forwards=False)


def _agreement(config: BalanceConfig, layers: Layers) -> dict[str, str]:
    agreement = {key: repr(value) for key, value in config.to_flat_dict().items()}
    agreement["converted layers"] = ", ".join(layers)
    agreement["segments whose units may change hands"] = "; ".join(
        f"{segment.name} ({len(segment.owned.owners)} {segment.kind} by {segment.shares})"
        for segment in owned_segments(layers)
    )
    return agreement


def _require_home(units: UnitsInForce, config: BalanceConfig) -> None:
    """Check that no unit is away in a mode whose layers must have their even shapes.

    Raises:
        ValueError: if some are.
    """
    if not units.is_home and config.mode not in AWAY_MODES:
        raise ValueError(
            f"units are divided by the shares {list(units.shares)}, and in mode {config.mode!r} all must be at home: "
            "before closing the balancer that moved them call its move() with equal shares"
        )


def _warn_of_what_stays(layers: Layers, config: BalanceConfig) -> None:
    staying = [name for name, layer in layers.items() if layer.segment is None or layer.segment.stays_even is not None]
    if staying and config.may_move:
        logger.warning(
            "the units of %d of %d layers cannot move (%s); the lines of level INFO tell why",
            len(staying),
            len(layers),
            first_of(staying),
        )


def _tell_what_stays(units: UnitsInForce, config: BalanceConfig, rank: int) -> None:
    """Where units were to move and cannot: a warning, once for all ranks, if it is for the optimizer."""
    if units.why_not_movable is None or config.mode not in MOVING_MODES or not config.moves:
        return
    if units.why_not_divisible is None:
        logger.info("no units change hands: %s", units.why_not_movable)
    elif rank == 0:
        logger.warning("no units change hands, and columns are lent instead: %s", units.why_not_movable)


def _build_decision(
    config: BalanceConfig, num_ranks: int, exchange: Exchange | None, units: UnitsInForce | None
) -> GroupDecision:
    if units is None:
        return GroupDecision(config, num_ranks, exchange)
    if units.why_not_movable is None:
        decision = GroupDecision(config, num_ranks, exchange, units.works, units.shares)
        if not config.may_move and units.shares != units.home:
            decision.hold_owned(units.shares)  # nobody else decides of it, also after a state was loaded
        return decision
    if units.is_home:
        return GroupDecision(config, num_ranks, exchange)
    stays = replace(config, moves=False) if config.mode in MOVING_MODES else config
    decision = GroupDecision(stays, num_ranks, exchange, units.works)
    decision.hold_owned(units.shares)
    return decision


def _build_selector(config: BalanceConfig, layers: Layers, rank: int) -> ColumnSelector:
    """What chooses ``rank``'s columns."""
    return ColumnSelector(
        config,
        rank,
        num_columns={name: layer.even_shape[1] for name, layer in layers.items()},
        costs=work_of_layers(layers),
        segments=segments_of_layers(layers),
    )


def _build_freezer(
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
            f"{num_ranks}: data-parallel replicas that freeze different columns would drift apart"
        )
    return ColumnFreezer(layers, optimizer)
