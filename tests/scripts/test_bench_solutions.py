"""What scripts/bench/solutions.py makes of its measurements."""

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("colossalai")

from scripts.bench import common
from scripts.bench.solutions import Bench, TimedStep, predictions_of_new_plans
from zeroresize.plan.group import RankPlan, Shares, WorkloadPlan

pytestmark = pytest.mark.colossalai


def steps_under(plan, *seconds, calibrates=0):
    return [TimedStep(own, plan, Shares(), number < calibrates) for number, own in enumerate(seconds)]


def plan_of(pruned, predicted_s):
    return WorkloadPlan((RankPlan(), RankPlan(pruned)), predicted_s)


def test_a_plan_is_new_where_its_shares_are():
    steps = [
        *steps_under(plan_of(0.0, math.nan), 5.0, 5.0),  # nothing came before it
        *steps_under(plan_of(0.5, 2.0), 5.0, 1.0, 1.0, calibrates=1),
        *steps_under(plan_of(0.5, 3.0), 1.0, 1.0),  # what it says of its own past
        *steps_under(plan_of(0.6, 1.5), 5.0, calibrates=1),  # nothing but a calibration step
        *steps_under(plan_of(0.4, 1.0), 2.0, 4.0, 3.0),
    ]
    assert predictions_of_new_plans(steps) == pytest.approx([2.0 / 1.0, 1.0 / 3.0])


def test_what_zero_drops_for_a_step_time_lies_between_what_was_measured():
    measured = {-0.1: [(0.2, 3.0), (0.2, 3.2), (0.2, 9.0)], 0.0: [(0.3, 2.0)] * 3, 0.1: [(0.4, 1.5)] * 3}
    bench = SimpleNamespace(pinned=measured)
    assert Bench.dropped_for(bench, 2.0) == pytest.approx(0.3)
    assert Bench.dropped_for(bench, 2.6) == pytest.approx(0.25)
    assert math.isnan(Bench.dropped_for(bench, 4.0))
    assert math.isnan(Bench.dropped_for(bench, 1.0))


@pytest.mark.parametrize(("chis", "expected"), [([1.0, 1.0], 10.0), ([1.0, 3.0], 2.0 + 8.0 * 1.5), ([1, 2, 2], 14.0)])
def test_the_bound_shares_products_out_by_speed(monkeypatch, chis, expected):
    """Of a homogeneous step of 10 s normal ranks multiply for 8; slow ones take longer for it, which is left out."""
    monkeypatch.setattr(common, "gather_from_ranks", lambda own: [own * chi for chi in chis])
    off = SimpleNamespace(metrics=lambda: {"balance/gemm_s": 8.0, "balance/busy_s": 9.0})
    assert common.shortest_step_s(off, chis, 10.0) == pytest.approx(expected)
    slowest_moves_s = common.shortest_step_s(off, chis, 10.0, 1.0) - expected
    assert slowest_moves_s == pytest.approx(0.0) if len(set(chis)) == 1 else slowest_moves_s > 0.1
