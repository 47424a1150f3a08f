"""Profiles come as often as what they cost allows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.pipeline.profile_cadence import (
    LEAST_BLOCKS,
    MOST_BLOCKS,
    ProfileCadence,
    SpentSeconds,
    profile_cost,
)


def due_blocks(cadence, num_blocks, cost):
    """The blocks that are measured; what each one costs is known at the end of the next."""
    due, pending = [], False
    for block in range(num_blocks):
        is_due = cadence.is_due(block)
        if is_due:
            cadence.measured(block)
            due.append(block)
        if pending:
            cadence.learn(cost)
        pending = is_due
    return due


@given(
    st.floats(0.0, 5.0),
    st.floats(0.001, 0.2),
    st.sampled_from(["auto", 1, 5, 40]),
)
def test_profiles_stay_within_their_share_and_between_the_bounds(cost, share, profile_every):
    cadence = ProfileCadence(profile_every, share)
    due = due_blocks(cadence, 400, cost)
    least = LEAST_BLOCKS if profile_every == "auto" else profile_every
    assert least <= cadence.every
    assert cadence.every <= max(least, MOST_BLOCKS)
    if cadence.every < MOST_BLOCKS and len(due) > 8:
        last = [block for block in due if block >= due[4]]  # the cost is known
        assert (len(last) - 1) * cost <= share * (last[-1] - last[0]) * (1 + 1e-9)


@pytest.mark.parametrize(("profile_every", "due"), [("auto", [0, 10, 20]), (1, [0, 10, 20]), (25, [0, 25])])
def test_while_the_cost_is_unknown_ten_blocks_lie_between_two_profiles_at_least(profile_every, due):
    cadence = ProfileCadence(profile_every, 0.01)
    assert due_blocks(cadence, 30, None) == due
    assert math.isnan(cadence.cost)


def test_single_profiles_that_were_held_up_do_not_count_and_dear_first_ones_not_for_long():
    for costs, every in (((0.1, 7.0, 0.1, 0.1, 9.0), 20), ((30.0,), 100), ((30.0,) * 3, MOST_BLOCKS)):
        cadence = ProfileCadence("auto", 0.01)
        for cost in costs:
            cadence.learn(cost)
        assert cadence.every == every


def test_changed_work_is_measured_twice_and_paid_for_later():
    cadence = ProfileCadence("auto", 0.01)
    for _ in range(5):
        cadence.learn(0.2)  # of 40 blocks
    cadence.measured(100)
    cadence.work_changed(110)
    assert not cadence.is_due(109) and cadence.is_due(110)
    cadence.measured(110)
    cadence.learn(0.2)
    assert cadence.is_due(111)
    cadence.measured(111)
    assert cadence.next_due == 191  # three profiles from 100 on, of which two are made up for by longer intervals
    cadence.work_changed(112)
    cadence.begin_anew(cadence.costs)
    cadence.measured(0)
    assert cadence.next_due == 40


def test_after_five_changes_in_a_row_that_moved_nothing_regular_profiles_suffice():
    cadence = ProfileCadence("auto", 0.01)
    cadence.begin_anew([0.2] * 5)
    due = []
    for block in range(200):
        if block % 10 == 0:
            cadence.work_changed(block)
        if cadence.is_due(block):
            cadence.measured(block)
            due.append(block)
    assert due[:10] == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41] and len(due) <= 14
    cadence.moved(200)
    assert cadence.next_due == 202
    cadence.work_changed(210)
    assert cadence.is_due(210)


def test_a_profile_costs_what_stages_take_longer_and_what_the_slowest_one_decides():
    spent = [
        SpentSeconds(usual_s=1.0, profiled_s=1.1, handling_s=0.01, step_s=1.5),
        SpentSeconds(usual_s=1.0, profiled_s=1.3, handling_s=0.05, step_s=2.0),
        SpentSeconds(usual_s=1.0, profiled_s=9.0, handling_s=0.02, step_s=1.2),  # was held up
    ]
    assert profile_cost(spent) == pytest.approx((0.3 + 0.05) / 2.0)
    fast = SpentSeconds(usual_s=1.0, profiled_s=0.7, handling_s=0.02, step_s=2.0)
    assert profile_cost([fast, fast]) == pytest.approx(0.01)  # no less than deciding
    assert profile_cost([fast, SpentSeconds(0.0, 0.7, 0.02, 0.0)]) is None  # where a rank knows nothing usual
