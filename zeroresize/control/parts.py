"""What a balancer is made of, as data: :mod:`zeroresize.control.assembly` makes it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.words import Whereabouts
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MOVABLE_MODES
from zeroresize.control.column_moves import ColumnMoves
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.memory_watch import MemoryWatch
from zeroresize.control.optimizer_steps import OptimizerSteps
from zeroresize.control.plan_execution import PlanExecution
from zeroresize.control.plan_installer import LineageTable
from zeroresize.control.setup_checks import Layers
from zeroresize.control.slowness_watch import SlownessWatch
from zeroresize.control.start_checks import StartCheck
from zeroresize.measure.column_statistics import ColumnStatistic
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.migration.lender import Lender
from zeroresize.optim.freezing import ColumnFreezer
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.resharding.units.owned_units import OwnedUnits


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
    def device(self) -> torch.device:
        """The device of the layers."""
        return next(iter(self.layers.values())).local_weight.device

    def close(self) -> None:
        """Take back all that is attached, whatever fails; afterwards the layers compute in full.

        Raises:
            RuntimeError: if what was lent cannot be taken back.
        """
        self.attached.close()
