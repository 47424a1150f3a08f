"""How much work is handed over, on plain numbers."""

import pytest
from helpers.virtual_training import rank

from zeroresize.migration.transport import LoanRoute
from zeroresize.policy.tensor.paper import lending_ratios
from zeroresize.policy.tensor.rules.sharing import borrowed_shares, loans_of


def test_the_papers_rule_is_equation_1_with_the_fastest_time():
    times = [rank(1.0), rank(2.0), rank(1.0, rest_s=5.0, gemm_s=0.1)]
    assert lending_ratios(times, [False, True, True], 1.0) == [0.0, pytest.approx(0.8 / 1.6), 1.0]


def test_what_is_lent_is_borrowed_by_those_who_have_room():
    loans = loans_of([0.0, 0.5, 0.0, 0.25], capacities=[0.2, -1.0, 0.6, -1.0])
    assert [(loan.owner, loan.share, loan.receivers) for loan in loans] == [(1, 0.5, (0, 2)), (3, 0.25, (0, 2))]
    assert loans[0].parts == pytest.approx((0.25, 0.75))
    assert borrowed_shares(loans, 4) == pytest.approx([0.1875, 0.0, 0.5625, 0.0])


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
