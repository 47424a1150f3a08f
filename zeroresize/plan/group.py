"""What was decided, as data: for the group and for a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """What becomes of one rank's product FLOPs, and what it computes for others, in units of its own at full work.

    Attributes:
        pruned: nobody computes it.
        lent: other ranks compute it.
        borrowed: what the rank computes for other ranks.
    """

    pruned: float = 0.0
    lent: float = 0.0
    borrowed: float = 0.0

    @property
    def spared(self) -> float:
        """Share of its own products that the rank does not compute, γ."""
        return self.pruned + self.lent

    @property
    def work(self) -> tuple[float, float]:
        """What the rank computes: two that differ in nothing else take equally long."""
        return self.spared, self.borrowed


@dataclass(frozen=True)
class RankPlan(Shares):
    """One rank's part in a plan: its shares, of which the pruned one may differ from layer to layer.

    Attributes:
        is_straggler: whether the rank was found to be one.
    """

    is_straggler: bool = False


@dataclass(frozen=True)
class Loan:
    """What one rank hands to others, in every balanced layer alike.

    Attributes:
        owner: whose columns.
        share: γ, the share of the owner's columns.
        receivers: who computes them, in the order in which they are divided.
        parts: which share of them each receiver computes; their sum is 1.
    """

    owner: int
    share: float
    receivers: tuple[int, ...]
    parts: tuple[float, ...]


@dataclass(frozen=True)
class WorkloadPlan:
    """The group's plan: the same on every rank, since all compute it from the same exchanged numbers.

    Attributes:
        ranks: one ``RankPlan`` a rank, in the order of the group.
        predicted_step_s: seconds of a step under this plan, the busy time of the slowest rank and what collectives add;
            NaN before anything was measured.
        loans: what migrates, in the order in which every rank carries it out.
    """

    ranks: tuple[RankPlan, ...]
    predicted_step_s: float = float("nan")
    loans: tuple[Loan, ...] = ()

    @property
    def relieved(self) -> list[int]:
        """Ranks that prune or lend."""
        return [rank for rank, shares in enumerate(self.ranks) if shares.spared > 0.0]

    @property
    def told(self) -> str:
        """Who prunes and lends how much, for a log."""
        shares = [
            f"rank {rank} prunes {self.ranks[rank].pruned:.2f} and lends {self.ranks[rank].lent:.2f} of its products"
            for rank in self.relieved
        ]
        return ", ".join(shares) or "every rank computes all of its products"
