"""The group's plan as one rank carries it out: pruned columns in its layers, loans among the ranks, pins above both."""

from __future__ import annotations

from dataclasses import replace

from zeroresize.comm.exchange import Exchange
from zeroresize.config import BalanceConfig
from zeroresize.control.plan_installer import PlanInstaller
from zeroresize.migration.lender import Lender
from zeroresize.plan.group import Shares, WorkloadPlan
from zeroresize.policy.columns.selector import ColumnSelector, Relief


class PlanInForce:
    """Carries out one plan after another.

    Args:
        config: how to balance.
        rank, num_ranks: this rank within its group, and the group's size.
        selector: says which columns a share is.
        installer: prunes and leaves to others in this rank's layers.
        lender: carries out loans; None where nothing migrates.
        exchange: with the other ranks; None in a group of one.

    Attributes:
        pins: γ that is forced in place of the plan's, by rank; the same on every rank.
        is_at_full_work: whether the next step prunes and lends nothing nevertheless, to be measured.
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
    ) -> None:
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._selector, self._installer, self._lender, self._exchange = selector, installer, lender, exchange
        self._plan = WorkloadPlan(())
        self._borrowed = 0.0
        self.pins: dict[int, float] = {}
        self.is_at_full_work = False
        self.shares_of_step = Shares()
        self.shares_of_last_step: Shares | None = None

    def install(self, plan: WorkloadPlan) -> None:
        """Carry out ``plan``, from the next iteration on; collective over the group where its loans are new.

        Raises:
            RuntimeError: if loans are new and not all ranks come.
        """
        own = plan.ranks[self._rank]
        self._plan, self._borrowed = plan, own.borrowed
        if self._rank in self.pins:
            self._installer.install(Relief(self.pins[self._rank], is_forced=True))
        else:
            is_forced = self._config.forced_ratio is not None
            self._installer.install(Relief(own.pruned, own.lent, is_forced=is_forced))
            if self.is_at_full_work:
                self._installer.suspend()
        if self._lender is not None:
            loans = () if self.is_at_full_work else plan.loans
            if self._exchange is not None and self._lender.would_be_new(loans, self._selector.epoch):
                self._exchange.meet()  # a rank that is a step ahead would send the others what they do not await
            self._lender.install(loans, self._installer.lent_columns(), epoch=self._selector.epoch)

    def send_weights(self) -> None:
        """Send the lent columns of all weights, as they are from now until the next optimizer step."""
        if self._lender is not None:
            self._lender.send_weights()

    def take_back(self) -> None:
        """Every layer computes all of its own columns, until the next :meth:`install`."""
        self._installer.clear()
        if self._lender is not None:
            self._lender.take_back()

    def begin_step(self) -> None:
        """An iteration begins under what is installed."""
        borrowed = 0.0 if self.is_at_full_work else self._borrowed
        self.shares_of_step = replace(self._installer.shares_in_force, borrowed=borrowed)

    def end_step(self) -> None:
        """The iteration is over: count it for the selector."""
        self.shares_of_last_step = self.shares_of_step
        self._selector.count_step(self._installer.in_force)

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
    def ratio(self) -> float:
        """γ of this rank by the plan, or by its pin."""
        return self._installer.relief.spared

    @property
    def planned(self) -> Shares:
        """This rank's shares by the plan, or by its pin; those of its own products are rounded to columns."""
        return replace(self._installer.shares, borrowed=self._borrowed)

    @property
    def layer_shares(self) -> dict[str, float]:
        """Share of every layer's columns that is pruned by the plan, or by a pin."""
        return self._installer.layer_shares

    @property
    def lent_to(self) -> dict[int, float]:
        """What each other rank computes of this rank's lent share."""
        return {
            receiver: self._installer.shares.lent * part
            for loan in self._plan.loans
            if loan.owner == self._rank
            for receiver, part in zip(loan.receivers, loan.parts, strict=True)
        }

    @property
    def is_forced(self) -> bool:
        """Whether someone forced just the ratio of the next step."""
        return self._installer.in_force.is_forced

    @property
    def agreed(self) -> tuple[object, ...]:
        """What every rank of the group must have alike, besides what is decided."""
        return self._selector.epoch, sorted(self.pins.items()), self.is_at_full_work

    def _require_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank={rank!r} is outside the process group: allowed are 0 to {self._num_ranks - 1}")
