"""The group's plan as one rank carries it out: pruned columns in its layers, loans among the ranks, pins above both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zeroresize.comm.exchange import Exchange
from zeroresize.config import BalanceConfig
from zeroresize.control.plan_installer import PlanInstaller
from zeroresize.migration.lender import Lender
from zeroresize.plan.group import Relief, Shares, WorkloadPlan
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.resharding.units.owned_units import OwnedUnits


class PlanExecution:
    """Carries out one plan after another.

    Args:
        config: how to balance.
        rank, num_ranks: this rank within its group, and the group's size.
        selector: says which columns a share is.
        installer: prunes and leaves to others in this rank's layers.
        lender: carries out loans; None where nothing migrates.
        exchange: with the other ranks; None in a group of one.
        units: of this rank; None in a group of one.

    Attributes:
        pins: γ that is forced in place of the plan's, by rank; the same on every rank.
        planned: this rank's shares by what is decided, or by its pin, also while a calibration step is made; those of
            its own products are rounded to columns.
        ratio: γ of it, before it is rounded.
        layer_shares: share of every layer's columns that is pruned by it.
        shares_of_step: what this rank does in the iteration under way.
        shares_of_last_step: in the one before it; None before the first.
    """

    def __init__(
        self,
        config: BalanceConfig,
        rank: int,
        num_ranks: int,
        *,
        selector: ColumnSelector,
        installer: PlanInstaller,
        lender: Lender | None,
        exchange: Exchange | None,
        units: OwnedUnits | None = None,
    ) -> None:
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._selector, self._installer, self._lender, self._exchange = selector, installer, lender, exchange
        self._units = units
        self._decided = self._plan = WorkloadPlan(())
        self.pins: dict[int, float] = {}
        self.planned, self.ratio = Shares(), 0.0
        self.layer_shares: Mapping[str, float] = {}
        self.shares_of_step = Shares()
        self.shares_of_last_step: Shares | None = None

    def install(self, decided: WorkloadPlan, calibration: WorkloadPlan | None = None) -> None:
        """Carry out ``decided``, or ``calibration`` if one comes before it, from the next iteration on.

        Collective over the group where loans are new.

        Raises:
            RuntimeError: if loans are new and not all ranks come.
        """
        plan = calibration or decided
        self._decided, self._plan = decided, plan
        self._installer.install(self._relief(decided))
        self.planned = self._with_others(decided)
        self.ratio, self.layer_shares = self._installer.relief.spared, self._installer.layer_shares
        if plan is not decided:
            self._installer.install(self._relief(plan))
        if self._lender is not None:
            if self._exchange is not None and self._lender.would_be_new(plan.loans, self._selector.state.epoch):
                self._exchange.meet()  # a rank that is a step ahead would send the others what they do not await
            self._lender.install(plan.loans, self._installer.lent_columns(), epoch=self._selector.state.epoch)

    def send_weights(self) -> None:
        """Send the lent columns of all weights, as they are from now until the next optimizer step."""
        if self._lender is not None:
            self._lender.send_weights()

    def take_back(self) -> None:
        """Let every layer compute all of its own columns, until the next :meth:`install`."""
        self._installer.clear()
        if self._lender is not None:
            self._lender.take_back()

    def begin_step(self) -> None:
        """Begin an iteration under what is installed."""
        self.shares_of_step = self._with_others(self._plan)

    def end_step(self) -> None:
        """End the iteration: count it for the selector."""
        self.shares_of_last_step = self.shares_of_step
        self._selector.count_step(self._installer.relief)

    def pin(self, rank: int, ratio: float) -> None:
        """Let ``rank`` prune ``ratio`` from the next :meth:`install` on, whatever is decided.

        Raises:
            ValueError: for a rank outside the group, a ratio outside [0, 1), or a mode that does not only prune.
        """
        self._require_rank(rank)
        self.pins[rank] = self._config.pinned(ratio, rank).forced_ratio or 0.0

    def release(self, rank: int | None) -> None:
        """Take back the pin of ``rank``, or of all ranks.

        Raises:
            ValueError: for a rank outside the group.
        """
        if rank is None:
            self.pins.clear()
        else:
            self._require_rank(rank)
            self.pins.pop(rank, None)

    @property
    def lent_to(self) -> dict[int, float]:
        """What each other rank computes of this rank's lent share."""
        return {
            receiver: self.planned.lent * part
            for loan in self._decided.loans
            if loan.owner == self._rank
            for receiver, part in zip(loan.receivers, loan.parts, strict=True)
        }

    @property
    def is_forced(self) -> bool:
        """Whether someone forced just the ratio of the next step."""
        return self._installer.relief.is_forced

    @property
    def agreed(self) -> tuple[object, ...]:
        """What every rank of the group must have alike, besides what is decided."""
        return self._selector.state.epoch, sorted(self.pins.items())

    def _with_others(self, plan: WorkloadPlan) -> Shares:
        """Return what is installed, with what this rank computes for others by ``plan``, and the units it owns."""
        borrowed, owned = plan.ranks[self._rank].borrowed, 1.0 if self._units is None else self._units.owned
        return replace(self._installer.shares, borrowed=borrowed, owned=owned)

    def _relief(self, plan: WorkloadPlan) -> Relief:
        """Return what this rank is relieved of under ``plan``, or by its pin."""
        if self._rank in self.pins:
            return Relief(self.pins[self._rank], is_forced=True)
        planned = plan.ranks[self._rank]
        return Relief(planned.pruned, planned.lent, is_forced=self._config.forced_ratio is not None)

    def _require_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank={rank!r} is outside the process group: allowed are 0 to {self._num_ranks - 1}")
