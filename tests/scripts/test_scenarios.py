"""What the table of scenarios calls settled, released and a false start."""

import math

import pytest

from scripts.simulated.figures import figures, mean_figures
from scripts.simulated.scenario import CALIBRATIONS, believed_cost
from scripts.simulated.training import Simulation
from zeroresize.policy.tensor.costs import ResizingCost

LINEAR = ResizingCost.linear(0.9)
#: Rank 1 is slow from update 10 to 20 of 30.
SLOW_FOR_A_WHILE = [[1.0, 2.0 if 10 <= update < 20 else 1.0] for update in range(30)]


def outcome(own_pruned, own_lent=None, step_s=(1.5, 2.5)):
    """Figures of a run in which rank 1 was spared so much and rank 0 nothing."""
    ratios, lent = ([[0.0, share] for share in shares] for shares in (own_pruned, own_lent or [0.0] * len(own_pruned)))
    run = Simulation(list(step_s), ratios, lent, pruned_share=0.1, lent_share=0.2)
    return figures(run, SLOW_FOR_A_WHILE, step_s_off=4.0)


def test_steps_and_shares_are_those_of_the_run():
    shown = outcome([0.0] * 30)
    assert (shown.step, shown.step_per_off, shown.pruned, shown.lent) == (2.0, 0.5, 0.1, 0.2)
    assert (shown.false_starts, shown.falsely_spared, shown.most_falsely_spared) == (0.0, 0.0, 0.0)


def test_a_straggler_settles_and_is_released_at_the_update_from_which_on_it_is_so():
    shown = outcome([0.0] * 11 + [0.5] * 10 + [0.0] * 9)
    assert (shown.settled, shown.swing, shown.released) == ((2,), 0.0, (2.0,))
    late = outcome([0.0] * 11 + [0.3, 0.5, 0.4] + [0.5] * 8 + [0.1, 0.1] + [0.0] * 6)
    assert (late.settled, late.swing, late.released) == ((5,), pytest.approx(0.1), (5.0,))


def test_what_is_lent_counts_as_what_is_pruned():
    shown = outcome([0.0] * 11 + [0.2] * 10 + [0.0] * 9, [0.0] * 11 + [0.2] * 11 + [0.0] * 8)
    assert (shown.settled, shown.released) == ((2,), (3.0,))


def test_who_is_never_released_is_spared_falsely():
    shown = outcome([0.0] * 11 + [0.5] * 19)
    assert shown.released == (math.inf,)
    assert shown.false_starts == 0.0, "it only goes on"
    judged = 30 + 10 + 7  # rank 0 always, rank 1 before and from three updates after it was slow
    assert shown.falsely_spared == pytest.approx(7 * 0.5 / judged)
    assert shown.most_falsely_spared == 0.5


def test_a_start_is_false_where_the_rank_has_not_been_slow_for_a_while():
    begins_twice = [0.0, 0.0, 0.3, 0.3, 0.0, 0.2] + [0.0] * 24
    assert outcome(begins_twice).false_starts == pytest.approx(100 * 2 / 30)
    while_it_may_be_heard_of = [0.0] * 20 + [0.0, 0.0, 0.4] + [0.0] * 7
    assert outcome(while_it_may_be_heard_of).false_starts == 0.0


def test_figures_of_several_runs():
    quick = outcome([0.0] * 11 + [0.5] * 10 + [0.0] * 9)
    never = outcome([0.0] * 11 + [0.3, 0.5, 0.6] + [0.5] * 16, step_s=(4.0, 4.0))
    both = mean_figures([quick, never])
    assert (both.settled, both.released) == ((2, 5), (2.0, math.inf))
    assert (both.step, both.swing, both.most_falsely_spared) == (3.0, pytest.approx(0.1), 0.5)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_a_calibration_that_is_wrong_by_1_is_right(calibration):
    assert believed_cost(LINEAR, calibration, 1.0).gemm_share == pytest.approx(LINEAR.gemm_share)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_a_factor_above_1_promises_more_than_pruning_saves(calibration):
    for factor, sign in ((1.5, 1.0), (1.0 / 1.5, -1.0)):
        believed = believed_cost(LINEAR, calibration, factor)
        assert all(
            sign * (truth - share) > 0.0
            for truth, share in zip(LINEAR.gemm_share[1:], believed.gemm_share[1:], strict=True)
        )
