"""SEMI by our rule, on plain numbers: what must hold for any group, and no grid of plans has a better one."""

import pytest
from helpers.virtual_training import (
    FREE,
    LINEAR,
    REALISTIC,
    balanced_s,
    group,
    groups,
    migrations,
    pruned_share,
    rank,
    step_s,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.migration.transport import LoanRoute
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.rules.makespan import makespan_division
from zeroresize.policy.tensor.rules.sharing import WorkDivision, borrowed_shares, loans_of


@given(chis=groups, migration=migrations, budget=st.floats(0, 1), cost=st.sampled_from([LINEAR, REALISTIC]))
@settings(deadline=None)
def test_a_division_is_possible_keeps_to_the_budget_and_is_never_slower_than_none(chis, migration, budget, cost):
    times, slow = group(*chis, cost=cost)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=budget)

    most = 0.9 if any(division.pruned) else 1.0  # γ_max bounds who prunes
    assert all(
        pruned >= 0 and lent >= 0 and pruned + lent <= most + 1e-6
        for pruned, lent in zip(division.pruned, division.lent, strict=True)
    )
    assert all(
        pruned == lent == 0
        for pruned, lent, is_slow in zip(division.pruned, division.lent, slow, strict=True)
        if not is_slow
    )
    assert pruned_share(division) <= budget + 1e-4
    assert step_s(times, division, migration) <= max(rank.busy_s for rank in times) * 1.06


def test_what_does_not_fit_is_pruned_and_the_normal_ranks_are_filled_up_to_the_goal():
    times, slow = group(4.0, 1.0)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.5)

    assert division.lent[0] == pytest.approx(0.05 / 0.8, abs=1e-3)  # the normal rank's room until 1.05
    assert division.busy_s(times) == [pytest.approx(1.05, abs=1e-3)] * 2
    only_pruning = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=None, budget=0.5)
    assert pruned_share(division) == pytest.approx(pruned_share(only_pruning) - 0.05 / 0.8 / 2, abs=1e-3)


def test_without_a_budget_it_is_exact_and_balanced():
    times, slow = group(8.0, 3.0, 1.0, 1.0)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.0)

    assert division.pruned == pytest.approx([0.0] * 4, abs=1e-3)
    assert step_s(times, division) == pytest.approx(balanced_s(times), rel=5e-3)


@pytest.mark.parametrize("per_share_s", [0.15, 1.0])
def test_where_moving_is_dear_no_grid_of_plans_has_a_better_one(per_share_s):
    times, slow = group(8.0, 1.0, 1.0, 1.0, cost=REALISTIC)
    migration = MigrationCost(0.0, per_share_s)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=0.2)

    def plan(pruned, lent):
        return WorkDivision((pruned, 0.0, 0.0, 0.0), (lent, 0.0, 0.0, 0.0))

    grid = [step / 45 for step in range(41)]
    plans = [plan(pruned, lent) for pruned in grid for lent in grid if pruned + lent <= 0.9 and pruned <= 0.8]
    fastest_s = min(step_s(times, one, migration) for one in plans)
    goal_s = max(1.05, fastest_s * 1.02)
    least = min(sum(one.pruned) for one in plans if step_s(times, one, migration) <= goal_s)
    assert step_s(times, division, migration) <= goal_s * 1.01
    assert sum(division.pruned) <= least + 0.02


@pytest.mark.timeout(30)  # with a loop over receivers for every owner it is minutes
@pytest.mark.parametrize("mode", ["semi", "mig"])
def test_an_update_of_thousands_of_ranks_takes_seconds(mode):
    chis = [1.0 + (r % 4 == 0) * (1 + r % 7) for r in range(4096)]
    times = [rank(chi) for chi in chis]
    controller = Controller(BalanceConfig(mode=mode), len(chis))
    collectives = CollectiveTimes(0.0, (0.0,) * len(chis), MigrationCost(1e-5, 1e-4))
    controller.update(times, collectives)
    assert controller.update(times, collectives).predicted_step_s < 3


def test_what_is_lent_is_borrowed_by_those_who_have_room():
    loans = loans_of([0.0, 0.5, 0.0, 0.25], capacities=[0.2, -1.0, 0.6, -1.0])
    assert [(loan.owner, loan.share, loan.receivers) for loan in loans] == [(1, 0.5, (0, 2)), (3, 0.25, (0, 2))]
    assert loans[0].parts == pytest.approx((0.25, 0.75))
    assert borrowed_shares(loans, 4) == pytest.approx([0.1875, 0.0, 0.5625, 0.0])
    (loan,) = loans_of([0.5, 0.0, 0.0], capacities=[0.0, 0.0, -0.1])
    assert loan.parts == (0.5, 0.5), "where nobody has room all take equally much"
    with pytest.raises(ValueError, match="no rank is left to compute"):
        loans_of([0.5, 0.5])


def test_receivers_without_columns_take_no_part():
    route = LoanRoute.of_parts(0, (2, 1, 3), (0, 0, 5, 5))
    assert (route.receivers, route.bounds, route.num_columns, route.part_of(1)) == ((1,), (0, 5), 5, slice(0, 5))
    assert LoanRoute.of_parts(0, (1, 2), (0, 0, 0)).receivers == ()
