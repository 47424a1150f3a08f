"""build(): checks what a balancer is given, and makes the parts that its steps go through."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import world_size
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MOVABLE_MODES, MOVING_MODES, PRIORITY_MODES, PRUNING_MODES
from zeroresize.control.group import Group, join_group
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.mover import Mover
from zeroresize.control.observer import Observer
from zeroresize.control.reporter import Reporter
from zeroresize.control.setup import Setup, checked_setup, prepare_layers, release_layers, tell_other_ranks
from zeroresize.control.start_checks import StartCheck
from zeroresize.measure.column_statistics import build_statistic
from zeroresize.migration.lender import Lender
from zeroresize.optim.freezing import ColumnFreezer


@dataclass(frozen=True)
class Parts:
    """Holds the parts of a balancer in the order in which a step goes through them.

    ``attached`` takes back what all of them attached to the layers, the optimizer and the group, the last one first.
    """

    setup: Setup
    group: Group
    observer: Observer
    decider: GroupDecision
    mover: Mover
    reporter: Reporter
    attached: ExitStack


def build(
    model: nn.Module,
    optimizer: Any,
    config: BalanceConfig,
    process_group: ProcessGroup | DeviceMesh | None = None,
    data_parallel_group: ProcessGroup | DeviceMesh | None = None,
) -> Parts:
    """Check what a balancer is given, and make its parts; collective, and errors are as :class:`.Balancer` tells.

    The order matters: what needs no other rank is checked before the ranks meet, and an optimizer calls hooks in the
    order in which they were made. Where something fails, what was attached until then is taken back.
    """
    try:
        setup = checked_setup(model, optimizer, config, process_group, data_parallel_group)
    except Exception as error:
        tell_other_ranks(model, process_group, error)
        raise
    is_alone = setup.num_ranks == 1
    with ExitStack() as attached:
        prepare_layers(setup)
        attached.callback(release_layers, setup)
        group = join_group(setup, attached)
        start_check = statistic = lender = None
        if group.exchange is not None and config.start_checks:
            start_check = StartCheck(model, setup.layers, optimizer, setup.process_group, group.exchange)
            attached.callback(start_check.close)
        # Before the statistic, which so sees weights that were put back.
        if config.pruned_update == "freeze" and config.mode in PRUNING_MODES and not is_alone:
            if world_size() > setup.num_ranks:
                raise ValueError(
                    f"pruned_update='freeze' needs a tensor-parallel group of all {world_size()} ranks, this one has "
                    f"{setup.num_ranks}: data-parallel replicas that freeze different columns would drift apart"
                )
            attached.callback(ColumnFreezer(setup.layers, setup.optimizer).close)
        if setup.layers and config.mode in PRIORITY_MODES:
            statistic = build_statistic(config, setup.layers, optimizer)
            attached.callback(statistic.close)
        if setup.may_lend and not is_alone:
            is_forced = config.forced_ratio is not None
            lender = Lender(setup.layers, setup.process_group, config.migration_transport, is_forced=is_forced)
            attached.callback(lender.close)
        observer = Observer(setup, group, start_check, statistic, attached)
        decider = _decider(setup, group)
        reporter = Reporter(config.tolerance, speaks=group.speaks)
        mover = Mover(setup, group, observer, decider, reporter, lender)
        attached.callback(mover.plans.clear)
        return Parts(setup, group, observer, decider, mover, reporter, attached.pop_all())


def _decider(setup: Setup, group: Group) -> GroupDecision:
    """Make what decides for the group; it moves units only where they can move, and holds shares that must stay."""
    config, units = setup.config, group.units
    # Replicas decide alike in modes in which that may move units.
    exchange = group.everybody if config.mode in MOVABLE_MODES else group.exchange
    if units is None or (units.why_not_movable is not None and units.is_home):
        works = () if units is None else (work for work in units.works if not work.is_even(setup.num_ranks))
        decider = GroupDecision(config, setup.num_ranks, exchange, [replace(work, stays=True) for work in works])
    else:
        is_movable = units.why_not_movable is None
        if config.mode in MOVING_MODES and not is_movable:
            config = replace(config, moves=False)
        decider = GroupDecision(config, setup.num_ranks, exchange, units.works)
        decider.hold_owned(units.shares)
        if is_movable and (config.may_move or units.shares == units.home):
            decider.hold_owned(None)  # else nobody decides of it, also after a state was loaded
    if group.memory is not None and group.memory.at_rest is not None:
        decider.expect_memory(group.memory.at_rest)
    return decider
