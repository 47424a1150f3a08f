"""Who should own how many units, against what no division can beat."""

import math

import numpy as np
import pytest
from helpers.virtual_training import LINEAR, REALISTIC
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.ownership import SegmentWork, unit_counts
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.ownership import fitting_shares, merged, normalised, owned_step_s, wanted_shares

#: So fine that rounding to whole units is no matter.
FINE = (SegmentWork(2_000_000, 1, 0.7), SegmentWork(4_000_000, 1, 0.3))
#: A rest that stays whoever owns what.
REST_S, GEMM_S = 0.2, 0.8


def rank(chi, cost=LINEAR, moving_rest=0.0, rest_s=REST_S):
    return RankTimes(rest_s, GEMM_S * chi, 1.0, cost, moving_rest=moving_rest)


def group(*chis, **changes):
    return GroupTimes(rank(chi, **changes) for chi in chis)


def wanted(times, are_stragglers=None, segments=FINE, **options):
    are_stragglers = are_stragglers or [own.busy_s > min(other.busy_s for other in times) for own in times]
    return wanted_shares(times, are_stragglers, segments, **options)


def bound_s(chis):
    """T*."""
    return REST_S + GEMM_S * len(chis) / math.fsum(1.0 / chi for chi in chis)


chis = st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.0, 8.0]), min_size=2, max_size=8).filter(
    lambda own: 1.0 in own and max(own) > 1.0
)


@settings(deadline=None)
@given(chis)
def test_shares_go_by_the_reciprocal_of_the_slowness_and_reach_the_bound(chi_of_ranks):
    times = group(*chi_of_ranks)
    shares = wanted(times)
    speeds = np.array([1.0 / chi for chi in chi_of_ranks])
    assert shares == pytest.approx(speeds * len(chi_of_ranks) / speeds.sum(), abs=1e-4)
    assert owned_step_s(times, shares, FINE) == pytest.approx(bound_s(chi_of_ranks), rel=1e-4)


@settings(deadline=None, max_examples=60)
@given(chis, st.sampled_from([LINEAR, REALISTIC]), st.floats(0.0, 0.9), st.data())
def test_no_other_division_is_faster(chi_of_ranks, cost, moving_rest, data):
    times = group(*chi_of_ranks, cost=cost, moving_rest=moving_rest)
    best_s = owned_step_s(times, wanted(times), FINE)
    other = data.draw(
        st.lists(st.just(0.0) | st.floats(1e-3, 3.0), min_size=len(chi_of_ranks), max_size=len(chi_of_ranks))
    )
    other = other if any(other) else [1.0] * len(other)
    assert best_s <= owned_step_s(times, normalised(other), FINE) * (1.0 + 1e-4)


def test_nobody_slow_and_nothing_that_can_move_is_home():
    times = group(1.0, 4.0)
    assert wanted_shares(times, [False, False], FINE) == (1.0, 1.0)
    assert wanted_shares(times, [False, True], ()) == (1.0, 1.0)


def test_home_is_kept_where_noise_could_be_all_that_is_won():
    times = group(1.0, 1.0, 1.0, 1.2)
    won = max(own.busy_s for own in times) / bound_s([1.0, 1.0, 1.0, 1.2]) - 1.0
    assert wanted(times, noise=0.9 * won) != (1.0,) * 4
    assert wanted(times, noise=1.1 * won) == (1.0,) * 4


def test_ranks_that_differ_by_noise_get_equal_shares():
    times = group(1.0, 1.02, 0.98, 1.01, 4.0)
    are_slow = [False] * 4 + [True]
    assert len(set(wanted_shares(times, are_slow, FINE, noise=0.05)[:4])) == 1
    assert len(set(wanted_shares(times, are_slow, FINE)[:4])) == 4


def test_a_rank_of_another_kind_is_not_taken_for_noise():
    """Half as fast from the start, but no straggler of this group of three kinds."""
    shares = wanted_shares(group(1.0, 1.0, 1.5, 4.0), [False, False, False, True], FINE, noise=0.05)
    assert shares[0] == shares[1] and shares[2] == pytest.approx(shares[0] / 1.5, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_every_rank_keeps_a_quantum(num_ranks):
    segments = (SegmentWork(16 * 8 * num_ranks, 8, 0.6), SegmentWork(num_ranks, 1, 0.4))
    shares = wanted(group(*[1.0] * (num_ranks - 1), 1000.0), segments=segments)
    assert min(unit_counts(shares, segments[0])) >= 8


def test_a_step_is_told_with_whole_heads():
    """Of two heads a rank one can go: a normal rank has three then, and the slow one takes as long for one."""
    heads = SegmentWork(8, 1, 0.5)
    times = group(1.0, 1.0, 1.0, 4.0)
    shares = (1.15, 1.15, 1.15, 0.55)
    counts = unit_counts(shares, heads)
    assert sorted(counts) == [1, 2, 2, 3]
    expected = 0.5 * (REST_S + 4 * GEMM_S) + 0.5 * (REST_S + 4 * GEMM_S * 0.5)
    assert owned_step_s(times, shares, (heads,)) == pytest.approx(expected)


def test_what_heads_cannot_balance_is_left_at_home():
    """One head a rank: whatever moves doubles what somebody has."""
    times, head = group(1.0, 1.0, 1.0, 1.5), SegmentWork(4, 1, 1.0)
    assert wanted(times, segments=(head,)) == (1.0,) * 4


def test_segments_that_divide_alike_are_one():
    segments = [SegmentWork(3072, 8, 0.04), SegmentWork(12, 1, 0.02)] * 12
    assert merged(segments) == (SegmentWork(3072, 8, pytest.approx(0.48)), SegmentWork(12, 1, pytest.approx(0.24)))
    times = group(1.0, 1.0, 2.0, 8.0)
    shares = wanted(times, segments=segments)
    assert owned_step_s(times, shares, segments) == pytest.approx(owned_step_s(times, shares, merged(segments)))


MOST = st.lists(st.floats(0.3, 3.0), min_size=3, max_size=3).filter(lambda most: sum(most) >= 3.05)


@given(MOST, st.lists(st.floats(1.0, 8.0), min_size=3, max_size=3))
def test_no_rank_owns_more_than_it_has_memory_for_and_what_fits_is_divided_best(most, chis):
    times = group(*chis)
    slow = [chi > min(chis) for chi in chis]
    shares = wanted_shares(times, slow, FINE, most_shares=most)
    assert sum(shares) == pytest.approx(3.0, abs=1e-4)
    assert all(share <= limit + 1e-4 for share, limit in zip(shares, most, strict=True))
    if not any(slow) or shares == fitting_shares(3, most):
        return
    every_rank = zip(chis, shares, most, strict=True)
    with_room = [REST_S + GEMM_S * chi * share for chi, share, limit in every_rank if share < limit - 1e-3]
    assert max(with_room) == pytest.approx(min(with_room), rel=0.01)


def test_the_ranks_that_are_not_slow_take_no_more_than_they_may():
    times = group(1.0, 1.0, 4.0)
    shares = wanted(times, most_s=1.05)
    assert REST_S + GEMM_S * shares[0] == pytest.approx(1.05, rel=1e-4) and shares[0] == shares[1]
    assert wanted(times, most_s=9.0) == wanted(times)
