"""What was decided, as data: for the group and for a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workshares:
    """Describe what becomes of one rank's product FLOPs, and what it computes for others.

    Attributes:
        pruned: share of what it owns that nobody computes.
        lent: share of what it owns that other ranks compute.
        borrowed: what the rank computes for other ranks, in units of a rank's products at even shares.
        owned: what the rank owns, in the same units; 1 is home. Of a decision it is what is wanted, of a step what the
            rounding to whole units made of that (:func:`~zeroresize.plan.ownership.owned_shares`).
    """

    pruned: float = 0.0
    lent: float = 0.0
    borrowed: float = 0.0
    owned: float = 1.0

    @property
    def spared(self) -> float:
        """Share of the products it owns that the rank does not compute, γ."""
        return self.pruned + self.lent

    @property
    def computes(self) -> bool:
        """Whether the rank computes anything at all."""
        return (self.spared < 1.0 and self.owned > 0.0) or self.borrowed > 0.0

    @property
    def work(self) -> tuple[float, float, float]:
        """Return what determines how long the rank computes: two ranks that are alike in it take equally long."""
        return self.spared, self.borrowed, self.owned


@dataclass(frozen=True, order=True)
class Relief(Workshares):
    """Describe the shares of a rank's products that are to become columns."""

    is_forced: bool = False  # whether someone forced just these; what is decided is rounded so that products are fast


@dataclass(frozen=True)
class RankPlan(Workshares):
    """Describe one rank's part in a plan: its shares, of which the pruned one may differ from layer to layer."""

    is_straggler: bool = False  # whether the rank was found to be one


@dataclass(frozen=True)
class Loan:
    """Describe what one rank hands to others, in every balanced layer alike."""

    owner: int  # whose columns
    share: float  # γ, the share of the owner's columns
    receivers: tuple[int, ...]  # who computes them, in the order in which they are divided
    parts: tuple[float, ...]  # which share of them each receiver computes; their sum is 1


@dataclass(frozen=True)
class WorkloadPlan:
    """Describe the group's plan, the same on every rank, since all compute it from the same exchanged numbers.

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
    def owned(self) -> tuple[float, ...]:
        """Return what each rank is to own, in units of a rank's products at even shares; all 1 is home."""
        return tuple(rank.owned for rank in self.ranks)

    @property
    def relieved(self) -> list[int]:
        """Return the ranks that prune or lend."""
        return [rank for rank, shares in enumerate(self.ranks) if shares.spared > 0.0]

    @property
    def description(self) -> str:
        """Return, for a log, who prunes and lends how much."""
        shares = []
        for rank in self.relieved:
            pruned, lent = self.ranks[rank].pruned, self.ranks[rank].lent
            parts = [f"prunes {100.0 * pruned:.3g} % of its products (nobody computes these)"] * (pruned > 0.0)
            parts += [f"lends {100.0 * lent:.3g} % of its products (other ranks compute these)"] * (lent > 0.0)
            shares.append(f"rank {rank} {' and '.join(parts)}")
        return ", ".join(shares) or "every rank computes all of its products"
