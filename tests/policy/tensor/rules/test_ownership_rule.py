"""Who should own how many units, against what no division can beat, and what a rank prunes in each segment."""

import math

import pytest
from helpers.virtual_training import LINEAR, REALISTIC
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.ownership import SegmentWork, unit_counts
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.ownership import (
    Bounds,
    fitting_shares,
    normalised,
    owned_step_s,
    wanted_shares,
    work_conserving_bound_s,
)
from zeroresize.policy.tensor.rules.sharing import pruned_by_segment

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


def test_nobody_slow_and_nothing_that_can_move_is_home():
    times = group(1.0, 4.0)
    assert wanted_shares(times, [False, False], FINE) == (1.0, 1.0)
    assert wanted_shares(times, [False, True], ()) == (1.0, 1.0)


def test_home_is_kept_where_noise_could_be_all_that_is_won():
    times = group(1.0, 1.0, 1.0, 1.2)
    won = max(own.busy_s for own in times) / bound_s([1.0, 1.0, 1.0, 1.2]) - 1.0
    assert wanted(times, noise=0.9 * won) != (1.0,) * 4
    assert wanted(times, noise=1.1 * won) == (1.0,) * 4


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


@pytest.mark.parametrize(("chis", "shares_of_even"), [((1, 2), 4 / 3), ((1, 8), 16 / 9), ((1,) * 7 + (4,), 8 / 7.25)])
def test_the_bound_of_products_is_the_paper_s(chis, shares_of_even):
    bounds = Bounds.of(group(*chis, moving_rest=0.4))
    assert bounds.of_products == pytest.approx(REST_S + GEMM_S * shares_of_even) == pytest.approx(bound_s(chis))
    # The fast ranks take over of the rest as much as of the products.
    assert bounds.of_units > bounds.of_products
    # Who does nothing takes what does not move all the same.
    assert work_conserving_bound_s([5.0, 0.1], [1.0, 1.0], [0.0, 0.0]) == 5.0
    assert work_conserving_bound_s([5.0, 0.1], [1.0, 1.0], [0.9, 0.0]) < 5.0


RANK = st.tuples(st.floats(0.05, 1.0), st.floats(0.2, 5.0), st.floats(0.0, 0.9))


@settings(deadline=None)
@given(st.lists(RANK, min_size=2, max_size=5), st.data())
def test_no_division_is_faster_than_the_bound_and_the_wanted_one_reaches_it(ranks, data):
    times = GroupTimes(RankTimes(rest_s, gemm_s, 1.0, LINEAR, moving_rest=rho) for rest_s, gemm_s, rho in ranks)
    least_s = Bounds.of(times).of_units
    numbers = st.lists(st.just(0.0) | st.floats(0.01, 1.0), min_size=len(ranks), max_size=len(ranks)).filter(any)
    shares = normalised(data.draw(numbers))
    assert owned_step_s(times, shares, FINE) >= least_s * (1.0 - 1e-4)
    slow = [rank.busy_s > min(other.busy_s for other in times) for rank in times]
    if any(slow):
        assert owned_step_s(times, wanted_shares(times, slow, FINE), FINE) <= least_s * 1.001
    realistic = GroupTimes(RankTimes(rest_s, gemm_s, 1.0, REALISTIC, moving_rest=rho) for rest_s, gemm_s, rho in ranks)
    if any(slow):
        best_s = owned_step_s(realistic, wanted_shares(realistic, slow, FINE), FINE)
        assert best_s <= owned_step_s(realistic, shares, FINE) * (1.0 + 1e-4)


SEGMENT = st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 1.0))


@given(st.lists(SEGMENT, min_size=1, max_size=6), st.floats(0.0, 0.5), st.floats(0.0, 0.45))
def test_what_is_pruned_is_divided_so_that_no_segment_takes_longer_than_it_must(segments, pruned, lent):
    owned, works = zip(*segments, strict=True)
    by_segment = pruned_by_segment(pruned, lent, owned, works)
    whole = sum(share * work for share, work in segments)
    assert all(0.0 <= share <= 1.0 - lent + 1e-9 for share in by_segment)
    in_all = sum(ratio * share * work for ratio, (share, work) in zip(by_segment, segments, strict=True))
    assert in_all == pytest.approx(pruned * whole, abs=1e-6)
    computed = [share * (1.0 - lent - ratio) for ratio, share in zip(by_segment, owned, strict=True)]
    level = max(computed)
    for ratio, share in zip(by_segment, computed, strict=True):
        assert ratio == 0.0 or share == pytest.approx(level, rel=1e-6, abs=1e-9)
