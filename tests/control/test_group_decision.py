"""What ranks decide from, of what each of them has measured."""

from types import SimpleNamespace

import pytest

from zeroresize.comm.pausing import Restraint
from zeroresize.config import BalanceConfig
from zeroresize.control.group_decision import GroupDecision, RankNumbers
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.memory import HeldBytes

COST = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.6, 0.2), (0.0, 0.01, 0.02), 1.25, 1.5)


class Echo:
    """Stands in for the exchange of one rank whose peers have measured what the test says."""

    def __init__(self, all_numbers):
        self.all_numbers, self.posted = all_numbers, None
        self.ranks = range(len(all_numbers))
        self.group, self.where = SimpleNamespace(rank=0), SimpleNamespace(num_steps=0)

    def post(self, row):
        self.posted = row

    def collect(self):
        """Rows of all ranks, who agree with this one; None before anything was posted."""
        if self.posted is None:
            return None
        fingerprint, self.posted = self.posted[0], None
        rows = [numbers.to_row() for numbers in self.all_numbers]
        return [[fingerprint, *row[1:], Restraint().wish()] for row in rows]


def decided(moving_rests):
    """The plan of two ranks, the second one thrice as slow, after four updates of the same numbers."""
    both = [
        RankNumbers(0.0, 0.0, HeldBytes(0.0, 0.0), RankTimes(0.4 * chi, 0.6 * chi, 1.0, COST, 0.01, moving_rest))
        for chi, moving_rest in zip((1.0, 3.0), moving_rests, strict=True)
    ]
    decision = GroupDecision(BalanceConfig(), 2, Echo(both), [SegmentWork(1000, 1, 1.0)])
    for _ in range(6):
        decision.update(both[0], None)
    return decision.decided


def test_what_moves_along_with_units_is_that_of_the_model_by_the_mean_over_ranks():
    assert decided((0.1, 0.7)) == decided((0.7, 0.1)) == decided((0.4, 0.4)) != decided((0.7, 0.7))
    assert decided((0.4, 0.4)).owned[1] == pytest.approx(0.5, abs=0.2)  # units do move


def test_a_plan_has_saved_nothing_before_the_run_was_resumed(monkeypatch):
    decision = GroupDecision(BalanceConfig(update_every=10), 2, None)
    monkeypatch.setattr(decision.controller, "predict_step_s", lambda plan: 1.0 if plan is decision.plan else 3.0)
    times = RankTimes(0.5, 0.5, 1.0, ResizingCost.linear(0.5))
    for num_steps in (5010, 5020):
        decision._account([times, times], num_steps)
    assert decision.saved_s == 2 * 10 * 2.0
