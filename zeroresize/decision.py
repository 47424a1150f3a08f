"""What a group decides: every rank's numbers go out at one update, and at the next everybody has the same plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from zeroresize.config import MIGRATING_MODES, PRUNING_MODES, BalanceConfig
from zeroresize.exchange import Exchange
from zeroresize.plan import WorkloadPlan
from zeroresize.policy.controller import Controller
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.ratio import RankTimes


class GroupDecision:
    """Keeps the group's plan, from one exchange to the next.

    Args:
        config: how to balance.
        num_ranks: size of the group.
        exchange: with the other ranks; None in a group of one.

    Attributes:
        plan: what is decided.
    """

    def __init__(self, config: BalanceConfig, num_ranks: int, exchange: Exchange | None) -> None:
        self._exchange = exchange
        self._controller = Controller(config, num_ranks)
        self._dry_runs = _dry_runs(config, num_ranks)
        self._received: list[list[float]] | None = None
        self.plan: WorkloadPlan = self._controller.initial_plan()
        self._told = [controller.initial_plan() for controller in self._dry_runs]

    def update(self, times: RankTimes | None, cost: ResizingCost, agreed: object) -> None:
        """Decide from what was sent at the last update, and send this rank's numbers.

        Args:
            times: this rank's full-work times, None before any were measured.
            cost: of pruning on this rank.
            agreed: whatever every rank must have decided alike, with a ``repr`` that tells it.

        Raises:
            RuntimeError: if the ranks of the group do not agree on their plans, or on ``agreed``.
        """
        if self._exchange is None:
            return
        fingerprint = self._fingerprint(agreed)
        self._collect()
        if self._received is not None:
            self._decide(self._received)
            self._received = None
        self._exchange.post([fingerprint, *_as_numbers(times, cost)])

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank; collects what is under way."""
        self._collect()
        return {
            "controller": self._controller.state_dict(),
            # A tuple is one entry of a checkpoint, which another mode finds too and leaves alone.
            "dry_runs": tuple(controller.state_dict() for controller in self._dry_runs),
            "received": self._received,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; what is under way is dropped, since it belongs to what is left behind.

        Raises:
            ValueError: if it was saved in a group of another size.
        """
        self._collect()
        self._controller.load_state_dict(state["controller"])
        for controller, saved in zip(self._dry_runs, state["dry_runs"], strict=False):  # none where it was not "off"
            controller.load_state_dict(saved)
        self._told = [controller.current_plan() for controller in self._dry_runs]
        self._received = state["received"]
        self.plan = self._controller.current_plan()

    @property
    def dry_run_plans(self) -> dict[str, WorkloadPlan]:
        """In mode "off", what every other mode would decide, by mode; else empty."""
        if not self._told:
            return {}
        pruning, migrating = self._told
        return {**dict.fromkeys(PRUNING_MODES, pruning), **dict.fromkeys(MIGRATING_MODES, migrating)}

    def close(self) -> None:
        """Leave the exchange."""
        if self._exchange is not None:
            self._exchange.close()

    def _collect(self) -> None:
        received = self._exchange.collect() if self._exchange is not None else None
        if received is not None:
            self._received = received

    def _decide(self, received: list[list[float]]) -> None:
        fingerprints = [numbers[0] for numbers in received]
        if len(set(fingerprints)) > 1:
            differing = [rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]]
            raise RuntimeError(
                f"ranks {differing} of the group hold another plan than rank 0: call pin, release and load_state_dict "
                "alike on every rank"
            )
        samples = [_as_rank_times(numbers[1:]) for numbers in received]
        self._told = [controller.update(samples) for controller in self._dry_runs]
        self.plan = self._controller.update(samples)

    def _fingerprint(self, agreed: object) -> float:
        """48 bits of a hash of what all ranks must agree on, exact as a float64."""
        told = repr(([rank.ratio for rank in self.plan.ranks], agreed))
        return float(int.from_bytes(hashlib.sha256(told.encode()).digest()[:6], "big"))


def _dry_runs(config: BalanceConfig, num_ranks: int) -> list[Controller]:
    """One controller that prunes and one that migrates: modes of one kind differ in the columns, not in how many."""
    if config.mode != "off":
        return []
    modes = (PRUNING_MODES[0], MIGRATING_MODES[0])
    return [Controller(config.replace(mode=mode, ratio="auto", ranks="stragglers"), num_ranks) for mode in modes]


def _as_numbers(times: RankTimes | None, cost: ResizingCost) -> list[float]:
    own = [times.rest_s, times.gemm_s, times.overhead_scale] if times is not None else [math.nan] * 3
    return [*own, *cost.ratios, *cost.gemm_share, *cost.overhead_s]


def _as_rank_times(numbers: list[float]) -> RankTimes:
    rest_s, gemm_s, overhead_scale, *points = numbers
    third = len(points) // 3
    cost = ResizingCost(*(tuple(points[i * third : (i + 1) * third]) for i in range(3)))
    return RankTimes(rest_s, gemm_s, overhead_scale, cost)
