"""No division is faster than T*, and where nothing rounds one is as fast."""

import pytest
from helpers.virtual_training import LINEAR
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.ownership import (
    Bounds,
    normalised,
    owned_step_s,
    wanted_shares,
    work_conserving_bound_s,
)

FINE = (SegmentWork(4_000_000, 1, 1.0),)
RANK = st.tuples(st.floats(0.05, 1.0), st.floats(0.2, 5.0), st.floats(0.0, 0.9))


@pytest.mark.parametrize(("chis", "shares_of_even"), [((1, 2), 4 / 3), ((1, 8), 16 / 9), ((1,) * 7 + (4,), 8 / 7.25)])
def test_of_products_it_is_the_paper_s(chis, shares_of_even):
    times = [RankTimes(0.3, 0.7 * chi, 1.0, LINEAR, moving_rest=0.4) for chi in chis]
    assert Bounds.of(times).of_products == pytest.approx(0.3 + 0.7 * shares_of_even)
    # The fast ranks take over of the rest as much as of the products.
    assert Bounds.of(times).of_units > Bounds.of(times).of_products


@given(st.lists(RANK, min_size=2, max_size=5), st.data())
def test_no_division_is_faster_and_the_wanted_one_reaches_it(ranks, data):
    times = GroupTimes(RankTimes(rest_s, gemm_s, 1.0, LINEAR, moving_rest=rho) for rest_s, gemm_s, rho in ranks)
    bound_s = Bounds.of(times).of_units
    shares = normalised(data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(ranks), max_size=len(ranks))))
    assert owned_step_s(times, shares, FINE) >= bound_s * (1.0 - 1e-4)
    slow = [rank.busy_s > min(other.busy_s for other in times) for rank in times]
    if any(slow):
        assert owned_step_s(times, wanted_shares(times, slow, FINE), FINE) <= bound_s * 1.001


def test_who_does_nothing_takes_what_does_not_move_all_the_same():
    assert work_conserving_bound_s([5.0, 0.1], [1.0, 1.0], [0.0, 0.0]) == 5.0
    assert work_conserving_bound_s([5.0, 0.1], [1.0, 1.0], [0.9, 0.0]) < 5.0
