"""How much work is handed over, on plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.migration.carrier import Route
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.ratio import RankTimes
from zeroresize.policy.sharing import balanced_shares, borrowed_shares, lending_ratios, loans_of, paper_lending_ratios

LINEAR = ResizingCost.linear(0.9)
ranks = st.lists(
    st.builds(RankTimes, st.floats(0.0, 5.0), st.floats(0.05, 5.0), st.just(1.0), st.just(LINEAR)),
    min_size=2,
    max_size=9,
)


def rank(rest_s, gemm_s):
    return RankTimes(rest_s, gemm_s, 1.0, LINEAR)


@given(ranks)
def test_balanced_shares_do_all_the_work_and_leave_nobody_to_wait_for(times):
    shares = balanced_shares(times)
    assert sum(shares) == pytest.approx(len(times))
    ends_s = [one.rest_s + share * one.gemm_s for one, share in zip(times, shares, strict=True)]
    level_s = max(end for end, share in zip(ends_s, shares, strict=True) if share > 0)
    for one, share, end_s in zip(times, shares, ends_s, strict=True):
        assert end_s == pytest.approx(level_s) if share > 0 else one.rest_s >= level_s * (1 - 1e-9)


@given(st.integers(2, 8), st.floats(1.0, 8.0), st.floats(0.0, 1.0))
def test_the_balanced_time_is_the_work_conserving_bound(num_ranks, chi, rest_s):
    """T* = R + M e / Σ 1/χ_i where all wait equally long outside their products."""
    times = [rank(rest_s, 1.0)] * (num_ranks - 1) + [rank(rest_s, chi)]
    shares = balanced_shares(times)
    bound_s = rest_s + num_ranks / (num_ranks - 1 + 1 / chi)
    for one, share in zip(times, shares, strict=True):
        assert one.rest_s + share * one.gemm_s == pytest.approx(bound_s)


def test_only_stragglers_lend():
    times = [rank(0.2, 1.0), rank(0.2, 1.05), rank(0.2, 4.0)]
    ratios = lending_ratios(times, [False, False, True])
    assert ratios[:2] == [0.0, 0.0] and 0.5 < ratios[2] < 0.8


def test_the_papers_rule_is_equation_1_with_the_fastest_time():
    times = [rank(0.2, 0.8), rank(0.2, 1.6), rank(5.0, 0.1)]
    assert paper_lending_ratios(times, [False, True, True], 1.0) == [0.0, pytest.approx(0.8 / 1.6), 1.0]


def test_what_is_lent_is_borrowed_by_those_who_have_room():
    loans = loans_of([0.0, 0.5, 0.0, 0.25], capacities=[0.2, -1.0, 0.6, -1.0])
    assert [(loan.owner, loan.ratio, loan.receivers) for loan in loans] == [(1, 0.5, (0, 2)), (3, 0.25, (0, 2))]
    assert loans[0].parts == pytest.approx((0.25, 0.75))
    assert borrowed_shares(loans, 4) == pytest.approx([0.1875, 0.0, 0.5625, 0.0])


def test_without_room_anywhere_work_is_divided_evenly():
    (loan,) = loans_of([0.5, 0.0, 0.0], capacities=[0.0, 0.0, -0.1])
    assert loan.parts == (0.5, 0.5)


def test_somebody_must_be_left_to_compute():
    with pytest.raises(ValueError, match="nobody is left"):
        loans_of([0.5, 0.5])


def test_receivers_without_columns_take_no_part():
    route = Route.of_parts(0, (2, 1, 3), (0, 0, 5, 5))
    assert (route.receivers, route.bounds, route.num_columns, route.part_of(1)) == ((1,), (0, 5), 5, slice(0, 5))
    assert Route.of_parts(0, (1, 2), (0, 0, 0)).receivers == ()
