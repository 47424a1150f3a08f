"""How much work is handed over, on plain numbers."""

import pytest
from helpers.virtual_training import REALISTIC, rank

from zeroresize.migration.transport import LoanRoute
from zeroresize.plan.group import Loan
from zeroresize.policy.tensor.rules.sharing import borrowed_shares, loans_of, paper_lending_ratios, predicted_busy_s


def test_the_papers_rule_is_equation_1_with_the_fastest_time():
    times = [rank(1.0), rank(2.0), rank(1.0, rest_s=5.0, gemm_s=0.1)]
    assert paper_lending_ratios(times, [False, True, True], 1.0) == [0.0, pytest.approx(0.8 / 1.6), 1.0]


def test_what_is_lent_is_borrowed_by_those_who_have_room():
    loans = loans_of([0.0, 0.5, 0.0, 0.25], capacities=[0.2, -1.0, 0.6, -1.0])
    assert [(loan.owner, loan.share, loan.receivers) for loan in loans] == [(1, 0.5, (0, 2)), (3, 0.25, (0, 2))]
    assert loans[0].parts == pytest.approx((0.25, 0.75))
    assert borrowed_shares(loans, 4) == pytest.approx([0.1875, 0.0, 0.5625, 0.0])


def test_few_columns_take_longer_than_their_share_whoever_owns_them():
    """At γ = 0.9 the tenth that is left takes 0.15 of the time; a tenth of others' columns takes as long."""
    loans = [Loan(0, 0.4, (1, 2), (0.25, 0.75))]
    times = [rank(1.0, REALISTIC)] * 3
    _, tenth_s, three_tenths_s = predicted_busy_s(times, [0.4, 0.0, 0.0], loans)
    assert tenth_s == pytest.approx(0.2 + 0.8 * 1.15)
    assert three_tenths_s == pytest.approx(0.2 + 0.8 * (1 + 0.15 + 0.35 * 2 / 3))
    assert predicted_busy_s(times, [0.0] * 3, [Loan(0, 1.5, (1, 2), (0.0, 1.0))])[2] == pytest.approx(0.2 + 0.8 * 2.5)


def test_without_room_anywhere_work_is_divided_evenly():
    (loan,) = loans_of([0.5, 0.0, 0.0], capacities=[0.0, 0.0, -0.1])
    assert loan.parts == (0.5, 0.5)


def test_somebody_must_be_left_to_compute():
    with pytest.raises(ValueError, match="no rank is left to compute"):
        loans_of([0.5, 0.5])


def test_receivers_without_columns_take_no_part():
    route = LoanRoute.of_parts(0, (2, 1, 3), (0, 0, 5, 5))
    assert (route.receivers, route.bounds, route.num_columns, route.part_of(1)) == ((1,), (0, 5), 5, slice(0, 5))
    assert LoanRoute.of_parts(0, (1, 2), (0, 0, 0)).receivers == ()
