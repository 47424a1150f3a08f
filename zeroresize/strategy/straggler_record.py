"""What balancing strategies decided and did, for telemetry: plain numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.stragglers.decision import StrategyProposal


@dataclass(frozen=True)
class StragglerRecord:
    """Tells of a change of strategies what was proposal, and what it took.

    Attributes:
        step: how many steps of ``StrategyBalancer`` were over.
        what: what was done, such as "shares" or "leave out".
        left_out: ranks that have no part any more.
        speeds: of all ranks, as they were believed to be.
        before, after: the strategies of the ranges, as plain values.
        step_s, expected_step_s: seconds of a step before and after, by the model of costs.
        switch_s: seconds that the switch took, or was to take where ``is_made`` is false.
        moved_bytes: that all ranks together received.
        is_made: false where memory did not suffice: then everything is as it was.
    """

    step: int
    what: str
    left_out: tuple[int, ...]
    speeds: tuple[float, ...]
    before: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    step_s: float
    expected_step_s: float
    switch_s: float
    moved_bytes: int
    is_made: bool

    @classmethod
    def of(
        cls,
        step: int,
        proposal: StrategyProposal,
        before: Sequence[Strategy],
        speeds: Sequence[float],
        *,
        switch_s: float,
        moved_bytes: int,
        is_made: bool,
    ) -> StragglerRecord:
        """Make the record of a decision that was carried out, or could not be."""
        candidate = proposal.candidate
        return cls(
            step,
            candidate.kind,
            candidate.left_out,
            tuple(speeds),
            tuple(one.as_dict() for one in before),
            tuple(one.as_dict() for one in candidate.strategies),
            proposal.step_s + proposal.saving_s,
            proposal.step_s,
            switch_s,
            moved_bytes,
            is_made,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key ``kind`` is "strategies"."""
        return {"kind": "strategies", **asdict(self)}

    def scalars(self) -> dict[str, float]:
        """Return numbers under ``strategy/``, by name."""
        return {
            "strategy/left_out": float(len(self.left_out)),
            "strategy/step_s": self.step_s,
            "strategy/expected_step_s": self.expected_step_s,
            "strategy/switch_s": self.switch_s,
            "strategy/moved_bytes": float(self.moved_bytes),
        }
