"""build(): checks what a balancer is given, and makes its parts, each only where the configuration needs it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import world_size
from zeroresize.comm.exchange import Exchange, ranks_with_replicas
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Whereabouts
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MOVABLE_MODES, MOVING_MODES, PRIORITY_MODES, PRUNING_MODES
from zeroresize.control.column_moves import ColumnMoves
from zeroresize.control.dropout_keys import DropoutKeys
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.memory_watch import MemoryWatch
from zeroresize.control.optimizer_steps import OptimizerSteps
from zeroresize.control.plan_execution import LineageTable, PlanExecution
from zeroresize.control.setup import (
    Layers,
    Setup,
    checked_setup,
    prepare_layers,
    release_layers,
    tell_other_ranks,
    warn_of_layers_that_stay,
)
from zeroresize.control.slowness_watch import SlownessWatch
from zeroresize.control.start_checks import StartCheck
from zeroresize.control.units_at_start import agree_on_units
from zeroresize.layers.segments import owned_segments, segments_of_layers, work_of_layers
from zeroresize.measure.column_statistics import ColumnStatistic, build_statistic
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.migration.lender import Lender
from zeroresize.optim.freezing import ColumnFreezer
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.resharding.agreement import MeetReplicas
from zeroresize.resharding.data_parallel import DataParallelReplicas, replicas_of
from zeroresize.resharding.units.owned_units import OwnedUnits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Parts:
    """Holds what a balancer is made of, on one rank; None stands for what its mode, or a group of one, does not need.

    Attributes:
        config: says how to balance.
        process_group: is the tensor-parallel group, of ``num_ranks``; this process is ``rank`` in it.
        layers: maps names to balanced layers, in the order of the model.
        lineage: tells which of their columns are pruned.
        where: holds this rank's whereabouts, which the other ranks and error texts are told.
        exchange: gathers numbers from the ranks of the group.
        exchange_of_replicas: gathers them from all ranks that move alike: from data-parallel replicas, too, where units
            may be away. Without replicas it is ``exchange``.
        may_be_away: whether units may be away from home at any time.
        start_check: compares the ranks' parameters when training begins.
        forward_watch: compares the ranks' batches, and notices where no step is called.
        optimizer_steps: counts the optimizer's steps, and notices where another optimizer steps.
        monitor: measures this rank's steps.
        statistic: tells how important each column is.
        decision: turns the group's exchanged numbers into a plan.
        selector: chooses the columns that make up a share.
        columns: lets what the selector knows of columns follow their units.
        plan_execution: carries out a plan.
        lender: carries out a plan's loans.
        freezer: keeps the optimizer off pruned columns.
        units: holds which units this rank owns; None in a group of one.
        memory: counts what this rank holds; None without ``config.memory_limits``.
        slowness: says who is slow; only in mode "off", where nothing else tells.
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
    may_be_away: bool
    start_check: StartCheck | None
    forward_watch: ForwardWatch | None
    optimizer_steps: OptimizerSteps | None
    monitor: RankMonitor
    statistic: ColumnStatistic | None
    decision: GroupDecision
    selector: ColumnSelector
    columns: ColumnMoves
    plan_execution: PlanExecution
    lender: Lender | None
    freezer: ColumnFreezer | None
    units: OwnedUnits | None
    memory: MemoryWatch | None
    slowness: SlownessWatch | None
    attached: ExitStack

    @property
    def decides_for_replicas(self) -> bool:
        """Whether data-parallel replicas decide alike: in modes in which that may move units."""
        return self.config.mode in MOVABLE_MODES

    @property
    def tells(self) -> bool:
        """Whether this rank writes to the log what all ranks decide alike, and replicas of the group with them."""
        everybody = self.exchange_of_replicas
        return self.rank == 0 and (everybody is None or everybody.ranks[0] == dist.get_rank())

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
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
    try:
        setup = checked_setup(model, optimizer, config, process_group, data_parallel_group)
    except Exception as error:
        tell_other_ranks(model, process_group, error)
        raise
    with ExitStack() as attached:
        # Layers, and the ranks that compute them.
        prepare_layers(setup)
        attached.callback(release_layers, setup)
        exchange = exchange_of_replicas = units = memory = None
        if setup.num_ranks > 1:
            keys = DropoutKeys(model, setup.layers, setup.process_group, config, are_divided=setup.are_divided)
            _kept(keys, attached)
            warn_of_layers_that_stay(setup)
            exchange = _kept(_exchange(setup), attached)
            replicas = replicas_of(model, setup.layers, setup.process_group, setup.replicas_group)
            memory = _kept(MemoryWatch(setup) if config.memory_limits is not None else None, attached)
            units = agree_on_units(setup, exchange.meet, replicas, memory)
            exchange_of_replicas = _kept(_exchange_of_replicas(setup, exchange, units, replicas), attached)
            if exchange_of_replicas is not exchange:
                units.meet = MeetReplicas(exchange_of_replicas.meet, exchange_of_replicas.ranks)
        # What hooks into layers and optimizer. The freezer comes before the statistic, which so sees weights that were
        # put back.
        start_check = _kept(_start_check(setup, exchange), attached)
        freezer = _kept(_freezer(setup), attached)
        statistic = _kept(_statistic(setup), attached)
        lender = _kept(_lender(setup), attached)
        # Measure.
        monitor = _kept(RankMonitor(setup.layers, config), attached)
        optimizer_steps = _kept(_optimizer_steps(setup, exchange, units), attached)
        forward_watch = _kept(_forward_watch(setup, exchange), attached)
        # Decide.
        decision = _decision(setup, exchange_of_replicas if config.mode in MOVABLE_MODES else exchange, units)
        if memory is not None and memory.at_rest is not None:
            decision.expect_memory(memory.at_rest)
        # Plan.
        selector = _selector(setup)
        knows_columns = setup.may_be_away and config.mode in PRUNING_MODES
        columns = ColumnMoves(selector, statistic, setup.layers, setup.rank, exchange if knows_columns else None)
        columns.follow(gathers=False)
        # Apply.
        plan_execution = PlanExecution(
            config,
            setup.rank,
            setup.num_ranks,
            setup.layers,
            selector=selector,
            lender=lender,
            exchange=exchange,
            units=units,
        )
        attached.callback(plan_execution.clear)
        return Parts(
            config=config,
            process_group=setup.process_group,
            rank=setup.rank,
            num_ranks=setup.num_ranks,
            layers=setup.layers,
            lineage=LineageTable(setup.layers),
            where=exchange.where if exchange is not None else Whereabouts(),
            exchange=exchange,
            exchange_of_replicas=exchange_of_replicas,
            may_be_away=setup.may_be_away,
            start_check=start_check,
            forward_watch=forward_watch,
            optimizer_steps=optimizer_steps,
            monitor=monitor,
            statistic=statistic,
            decision=decision,
            selector=selector,
            columns=columns,
            plan_execution=plan_execution,
            lender=lender,
            freezer=freezer,
            units=units,
            memory=memory,
            slowness=_kept(_slowness(setup, exchange), attached),
            attached=attached.pop_all(),
        )


class _Closable(Protocol):
    @property
    def close(self) -> Any: ...


_Part = TypeVar("_Part", bound="_Closable | None")


def _kept(part: _Part, attached: ExitStack) -> _Part:
    """Return ``part``, and close it when what is attached is taken back."""
    if part is not None:
        attached.callback(part.close)
    return part


def _exchange(setup: Setup) -> Exchange:
    """Join the other ranks for exchanging numbers, once all agree on what they will do; collective.

    Raises:
        ValueError: if they do not agree.
    """
    return Exchange(CpuGroup(setup.process_group, _agreement(setup)))


def _exchange_of_replicas(
    setup: Setup, exchange: Exchange, units: OwnedUnits, replicas: DataParallelReplicas
) -> Exchange:
    """Join the ranks of all data-parallel replicas, too, where units may be away; collective.

    Returns:
        ``exchange`` itself where there are no replicas, or none that must move alike.

    Raises:
        ValueError: if the ranks do not agree on what they will do, or are no whole replicas.
    """
    if world_size() <= setup.num_ranks or not setup.may_be_away:
        return exchange
    data_parallel_group = replicas.group if units.why_not_movable is None else None
    ranks = ranks_with_replicas(setup.process_group, data_parallel_group, exchange)
    if not ranks:
        return exchange
    group = CpuGroup(setup.process_group, _agreement(setup), ranks, exchange.where)
    return Exchange(group, counts_forwards=False)


def _agreement(setup: Setup) -> dict[str, str | list[str]]:
    """Describe all that the ranks must have alike: the configuration, the converted layers, and their segments."""
    agreement: dict[str, str | list[str]] = {key: repr(value) for key, value in setup.config.to_flat_dict().items()}
    agreement["converted layers"] = list(setup.layers)
    agreement["segments whose units may change hands"] = [
        f"{segment.name} ({len(segment.owned.owners)} {segment.kind} by {segment.shares})"
        for segment in owned_segments(setup.layers)
    ]
    return agreement


def _start_check(setup: Setup, exchange: Exchange | None) -> StartCheck | None:
    if exchange is None or not setup.config.start_checks:
        return None
    return StartCheck(setup.model, setup.layers, setup.optimizer, setup.process_group, exchange)


def _freezer(setup: Setup) -> ColumnFreezer | None:
    """Make what keeps the optimizer off pruned columns.

    Raises:
        ValueError: if there are ranks outside the group.
    """
    config, num_ranks = setup.config, setup.num_ranks
    if config.pruned_update != "freeze" or config.mode not in PRUNING_MODES or num_ranks == 1:
        return None
    if world_size() > num_ranks:
        raise ValueError(
            f"pruned_update='freeze' needs a tensor-parallel group of all {world_size()} ranks, this one has "
            f"{num_ranks}: data-parallel replicas that freeze different columns would drift apart"
        )
    return ColumnFreezer(setup.layers, setup.optimizer)


def _statistic(setup: Setup) -> ColumnStatistic | None:
    """Make what tells how important each column is."""
    config, layers, optimizer = setup.config, setup.layers, setup.optimizer
    if not layers or config.mode not in PRIORITY_MODES:
        return None
    return build_statistic(config, layers, optimizer)


def _lender(setup: Setup) -> Lender | None:
    """Make what carries out loans; collective."""
    if setup.num_ranks == 1 or not setup.may_lend:
        return None
    config = setup.config
    is_forced = config.forced_ratio is not None
    return Lender(setup.layers, setup.process_group, config.migration_transport, is_forced=is_forced)


def _optimizer_steps(setup: Setup, exchange: Exchange | None, units: OwnedUnits | None) -> OptimizerSteps | None:
    """Make what counts the optimizer's steps; units do not move where it tells that another optimizer steps."""
    if exchange is None:
        return None
    optimizer_steps = OptimizerSteps(setup.optimizer, exchange.where, setup.layers)
    if units is not None:
        units.checks.append(optimizer_steps.why_another_steps)
    return optimizer_steps


def _forward_watch(setup: Setup, exchange: Exchange | None) -> ForwardWatch | None:
    if exchange is None:
        return None
    groups = {id(layer.process_group): layer.process_group for layer in setup.layers.values()}.values()
    return ForwardWatch(setup.layers, exchange, compares=setup.config.start_checks, groups=groups)


def _slowness(setup: Setup, exchange: Exchange | None) -> SlownessWatch | None:
    """Make what says who is slow, where nothing is balanced; it counts from the first share that would be."""
    if exchange is None or setup.config.mode != "off":
        return None
    return SlownessWatch(exchange, setup.rank, setup.num_ranks, setup.config.update_every)


def _decision(setup: Setup, exchange: Exchange | None, units: OwnedUnits | None) -> GroupDecision:
    """Make what decides for the group; it moves units only where they can move, and holds shares that must stay."""
    config, num_ranks = setup.config, setup.num_ranks
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


def _selector(setup: Setup) -> ColumnSelector:
    """Make what chooses this rank's columns."""
    return ColumnSelector(
        setup.config,
        setup.rank,
        num_columns={name: layer.even_shape[1] for name, layer in setup.layers.items()},
        costs=work_of_layers(setup.layers),
        segments=segments_of_layers(setup.layers),
    )
