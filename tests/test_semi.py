"""SEMI on plain numbers: what must hold for any group, and the paper's equations by brute force."""

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.policy.communication import CollectiveTimes, CommunicationEstimate
from zeroresize.policy.controller import Controller
from zeroresize.policy.cost_model import MigrationCost, ResizingCost
from zeroresize.policy.makespan import makespan_division
from zeroresize.policy.ratio import RankTimes
from zeroresize.policy.semi import migrated_share, num_migrating_by_benefit, paper_division
from zeroresize.policy.sharing import Division, balanced_shares
from zeroresize.simulate import Cluster, simulate

LINEAR = ResizingCost.linear(0.9)
REALISTIC = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
FREE = MigrationCost()


def rank(chi, cost=LINEAR, rest_s=0.2, gemm_s=0.8):
    return RankTimes(rest_s, chi * gemm_s, 1.0, cost)


def group(*chis, cost=LINEAR):
    return [rank(chi, cost) for chi in chis], [chi > 1 for chi in chis]


def pruned_share(division):
    return sum(division.pruned) / len(division.pruned)


def step_s(times, division, migration=FREE):
    return max(division.busy_s(times)) + migration.seconds(division.lent)


groups = st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.0, 8.0]), min_size=2, max_size=8).filter(
    lambda chis: 1.0 in chis
)
migrations = st.builds(MigrationCost, st.floats(0, 0.3), st.floats(0, 1))


@given(chis=groups, migration=migrations, budget=st.floats(0, 1), cost=st.sampled_from([LINEAR, REALISTIC]))
@settings(deadline=None)
def test_a_division_is_possible_keeps_to_the_budget_and_is_never_slower_than_none(chis, migration, budget, cost):
    times, slow = group(*chis, cost=cost)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=budget)

    assert all(
        pruned >= 0 and lent >= 0 and pruned + lent <= 0.9 + 1e-6
        for pruned, lent in zip(division.pruned, division.lent, strict=True)
    )
    assert all(
        pruned == lent == 0 for pruned, lent, own in zip(division.pruned, division.lent, slow, strict=True) if not own
    )
    assert pruned_share(division) <= budget + 1e-4
    assert step_s(times, division, migration) <= max(rank.busy_s for rank in times) * 1.06


def test_work_that_fits_into_the_tolerance_of_many_ranks_is_moved_and_none_is_pruned():
    times, slow = group(2.0, *[1.0] * 15)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.5)

    assert pruned_share(division) == pytest.approx(0.0, abs=1e-4)
    balanced = 1.0 - balanced_shares(times)[0]
    assert division.lent[0] == pytest.approx(balanced, abs=3e-3)


def test_what_does_not_fit_is_pruned_and_the_normal_ranks_are_filled_up_to_the_goal():
    times, slow = group(4.0, 1.0)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.5)

    assert division.lent[0] == pytest.approx(0.05 / 0.8, abs=1e-3)  # the normal rank's room until 1.05
    assert division.busy_s(times) == [pytest.approx(1.05, abs=1e-3)] * 2
    only_pruning = makespan_division(
        times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.5, num_migrating=0
    )
    assert pruned_share(division) == pytest.approx(pruned_share(only_pruning) - 0.05 / 0.8 / 2, abs=1e-3)


def test_nothing_moves_where_moving_takes_longer_than_the_goal_allows():
    times, slow = group(4.0, 1.0)
    division = makespan_division(
        times, slow, reference_s=1.0, tolerance=0.05, migration=MigrationCost(0.06, 0.0), budget=0.5
    )
    assert division.lent == (0.0, 0.0) and division.pruned[0] > 0


def test_without_a_budget_it_is_exact_and_balanced():
    times, slow = group(8.0, 3.0, 1.0, 1.0)
    division = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=FREE, budget=0.0)

    assert division.pruned == pytest.approx([0.0] * 4, abs=1e-3)
    level_s = times[3].rest_s + balanced_shares(times)[3] * times[3].gemm_s
    assert step_s(times, division) == pytest.approx(level_s, rel=5e-3)


def test_where_the_goal_is_out_of_reach_the_normal_ranks_have_time_to_take_all_of_it():
    floor = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.5, 0.25), (0.0, 0.0, 0.0))  # at gamma .9 a quarter of the time
    times = [rank(8.0, floor), rank(1.0, floor)]
    division = makespan_division(
        times, [True, False], reference_s=1.0, tolerance=0.05, migration=MigrationCost(0.01, 0.01), budget=1.0
    )
    assert step_s(times, division) == pytest.approx(0.2 + 6.4 * 0.25)
    assert division.pruned[0] == pytest.approx(0.0, abs=1e-3) and division.lent[0] == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("migration", [FREE, MigrationCost(0.02, 0.1), MigrationCost(0.1, 0.5)])
def test_the_number_that_migrate_is_the_best_of_all_numbers(migration):
    """Fig. 11: chi = 8, 6, 4, 2 of eight ranks."""
    times, slow = group(8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    chosen = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=0.5)
    each = [
        makespan_division(
            times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=0.5, num_migrating=count
        )
        for count in range(5)
    ]
    in_time = [division for division in each if step_s(times, division, migration) <= 1.055]
    assert in_time
    assert step_s(times, chosen, migration) <= 1.055
    assert pruned_share(chosen) <= min(map(pruned_share, in_time)) + 1e-3


@pytest.mark.parametrize("num_ranks", [64, 4096])
def test_in_large_groups_one_straggler_lends_instead_of_pruning(num_ranks):
    times, slow = group(2.0, *[1.0] * (num_ranks - 1))
    division = makespan_division(
        times, slow, reference_s=1.0, tolerance=0.05, migration=MigrationCost(0.001, 0.01), budget=0.5
    )
    assert max(division.pruned) == 0.0 and division.lent[0] > 0.4


def test_ranks_just_below_the_tolerance_take_work_in_too():
    """As water-filling has it: exact plans reach the work-conserving bound."""
    times = [rank(chi) for chi in (8.0, 1.3, 1.3, 1.0)]
    division = makespan_division(
        times, [True, True, True, False], reference_s=1.0, tolerance=0.0, migration=FREE, budget=0.0
    )
    level_s = times[3].rest_s + balanced_shares(times)[3] * times[3].gemm_s
    assert step_s(times, division) == pytest.approx(level_s, rel=5e-3)


@pytest.mark.parametrize("per_share_s", [0.15, 0.5, 1.0])
def test_where_moving_is_dear_no_grid_of_plans_has_a_better_one(per_share_s):
    times, slow = group(8.0, 1.0, 1.0, 1.0, cost=REALISTIC)
    migration = MigrationCost(0.0, per_share_s)
    found = makespan_division(times, slow, reference_s=1.0, tolerance=0.05, migration=migration, budget=0.2)

    def plan(pruned, lent):
        return Division((pruned, 0.0, 0.0, 0.0), (lent, 0.0, 0.0, 0.0))

    grid = [step / 90 for step in range(82)]
    plans = [plan(pruned, lent) for pruned in grid for lent in grid if pruned + lent <= 0.9 and pruned <= 0.8]
    fastest_s = min(step_s(times, one, migration) for one in plans)
    goal_s = max(1.05, fastest_s * 1.02)
    least = min(sum(one.pruned) for one in plans if step_s(times, one, migration) <= goal_s)
    assert step_s(times, found, migration) <= goal_s * 1.01
    assert sum(found.pruned) <= least + 0.02


@pytest.mark.parametrize("mode", ["semi", "mig"])
def test_an_update_of_thousands_of_ranks_takes_seconds(mode):
    chis = [1.0 + (r % 4 == 0) * (1 + r % 7) for r in range(8192)]
    times = [rank(chi) for chi in chis]
    controller = Controller(BalanceConfig(mode=mode), len(chis))
    collectives = CollectiveTimes(0.0, (0.0,) * len(chis), MigrationCost(1e-5, 1e-4))
    controller.update(times, collectives)
    began = time.perf_counter()
    plan = controller.update(times, collectives)
    assert time.perf_counter() - began < 30  # with a loop over receivers for every owner it is half an hour
    assert plan.predicted_step_s < 3


# ---- the paper's equations -------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1.2, 10), min_size=1, max_size=6), st.integers(1, 4), migrations)
def test_equation_3_is_what_a_double_loop_finds(slow_s, num_normal, migration):
    busy_s = [*sorted(slow_s, reverse=True), *[1.0] * num_normal]
    num_ranks, found = len(busy_s), 0
    for x in range(1, min(len(slow_s), num_ranks - 1) + 1):
        work = sum((busy_s[k] - 1.0) / busy_s[k] for k in range(x))
        computing_s = max(work / (num_ranks - x) * busy_s[y] for y in range(x, num_ranks))
        sending_s = migration.fixed_s * x + migration.per_share_s * work
        if busy_s[x - 1] - 1.0 - sending_s - computing_s > 0:
            found = x
    assert num_migrating_by_benefit(busy_s, len(slow_s), 1.0, migration) == found


@given(ratio=st.floats(0.05, 0.9), fixed_s=st.floats(0, 0.02), per_share_s=st.floats(0, 0.1))
def test_the_share_of_equation_2_balances_both_overheads(ratio, fixed_s, per_share_s):
    straggler, migration = rank(4.0, REALISTIC), MigrationCost(fixed_s, per_share_s)
    beta = migrated_share(straggler, ratio, migration, normal_gemm_s=0.8, num_ranks=4)

    def excess(share):
        resizing_s = REALISTIC.overhead_at(ratio * (1 - share))
        return resizing_s - migration.seconds([ratio * share]) - 0.8 * ratio * share / 3

    assert 0.0 <= beta <= 1.0
    assert excess(max(beta - 1e-3, 1e-9)) >= -1e-3 or beta == 0.0
    assert excess(min(beta + 1e-3, 1.0)) <= 1e-3


def test_forced_numbers_of_migrating_ranks_go_from_resizing_to_migrating_only():
    times, slow = group(8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    for count in range(5):
        division = paper_division(times, slow, reference_s=1.0, migration=FREE, max_ratio=0.9, num_migrating=count)
        assert [share > 0 for share in division.lent] == [place < count for place in range(8)]
        assert [share > 0.02 for share in division.pruned[count:4]] == [True] * (4 - count)


def test_what_remains_to_resize_aims_at_the_normal_ranks_with_the_work_they_took_in():
    times, slow = group(8.0, 2.0, 1.0, 1.0)
    division = paper_division(times, slow, reference_s=1.0, migration=FREE, max_ratio=0.9, num_migrating=1)
    busy = division.busy_s(times)
    assert busy[1] == pytest.approx(max(busy[2], busy[3]), rel=1e-6)


# ---- in the controller -----------------------------------------------------------------------------------------------


def test_the_cost_of_migrating_is_learned_from_training():
    estimate = CommunicationEstimate(0.7)
    pretested, true_factor = MigrationCost(0.1, 0.4), 1.7
    estimate.learn(CollectiveTimes(0.05, (0.0, 0.0), pretested), busy_s=0.5)
    for _ in range(6):
        waited_s = 0.05 + true_factor * pretested.seconds([0.5])
        estimate.learn(CollectiveTimes(waited_s, (0.5, 0.0), pretested), busy_s=0.5)
    assert estimate.seconds((0.25, 0.0)) == pytest.approx(0.05 + true_factor * pretested.seconds([0.25]), rel=0.1)

    restored = CommunicationEstimate(0.7)
    restored.load_state_dict(estimate.state_dict())
    assert restored == estimate


def test_where_migrating_cannot_be_measured_semi_only_resizes():
    controller = Controller(BalanceConfig(mode="semi"), 2)
    times, _ = group(4.0, 1.0)
    for _ in range(4):
        plan = controller.update(times)
    assert plan.loans == () and plan.ranks[0].ratio > 0.5


def lent_and_pruned(run):
    return [[*pruned, *lent] for pruned, lent in zip(run.ratios, run.lent, strict=True)]


@pytest.mark.parametrize(
    ("chis", "migration", "noise"),
    [
        ([2.0] + [1.0] * 7, MigrationCost(0.02, 0.03), 0.02),
        ([4.0] + [1.0] * 7, MigrationCost(0.005, 0.03), 0.03),
        ([2.0, 2.0] + [1.0] * 14, MigrationCost(0.02, 0.01), 0.01),
        ([8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0], MigrationCost(0.01, 0.05), 0.02),
    ],
)
def test_noise_neither_moves_a_settled_plan_nor_swaps_who_lends(chis, migration, noise):
    cluster = Cluster(lambda step: chis, 0.2, 0.8, REALISTIC, migration=migration, noise=noise, seed=1)
    run = simulate(BalanceConfig(mode="semi"), cluster, 600)
    steady = list(zip(*lent_and_pruned(run)[8:], strict=True))
    assert max(max(shares) - min(shares) for shares in steady) <= 0.1


def test_a_receiver_that_becomes_a_little_slower_gets_less():
    controller = Controller(BalanceConfig(mode="mig"), 8)
    chis = [8.0] + [1.0] * 7
    for _ in range(4):
        controller.update([rank(chi) for chi in chis])
    chis[3] = 1.09
    for _ in range(4):
        plan = controller.update([rank(chi) for chi in chis])
    fresh = Controller(BalanceConfig(mode="mig"), 8)
    for _ in range(4):
        best = fresh.update([rank(chi) for chi in chis])
    assert plan.predicted_step_s <= 1.02 * best.predicted_step_s


def test_pruned_and_lent_change_together():
    """Where lending becomes worthwhile what is pruned does not fall before what is lent rises."""
    controller = Controller(BalanceConfig(mode="semi"), 4)
    times, _ = group(4.0, 1.0, 1.0, 1.0)
    dear, cheap = (CollectiveTimes(0.0, (0.0,) * 4, MigrationCost(fixed_s, 0.01)) for fixed_s in (1.0, 0.001))
    for _ in range(4):
        plan = controller.update(times, dear)
    assert plan.loans == ()
    for _ in range(3):
        plan = controller.update(times, cheap)
        assert plan.predicted_step_s <= 1.1
    assert plan.loans


@pytest.mark.parametrize("before", [{"mode": "semi"}, {"mode": "zero-pridiff"}, {"mode": "mig"}])
def test_a_state_that_does_more_than_is_allowed_now_is_not_carried_out(before):
    times, _ = group(8.0, 1.0)
    saved = Controller(BalanceConfig(**before), 2)
    for _ in range(4):
        saved.update(times, CollectiveTimes(0.0, (0.0, 0.0), MigrationCost(0.01, 0.01)))
    exact = Controller(BalanceConfig(mode="semi", budget=0.0), 2)
    exact.load_state_dict(saved.state_dict())
    assert [own.ratio for own in exact.current_plan().ranks] == [0.0, 0.0]
    forced = Controller(BalanceConfig(mode="zero-rd", ratio=0.25, ranks=[1]), 2)
    forced.load_state_dict(saved.state_dict())
    assert [(own.ratio, own.lent) for own in forced.current_plan().ranks] == [(0.0, 0.0), (0.25, 0.0)]


def test_nothing_is_pruned_beyond_the_budget_where_the_cost_of_migrating_is_unknown():
    times, _ = group(8.0, 1.0)
    controller = Controller(BalanceConfig(mode="semi", budget=0.0), 2)
    for _ in range(4):
        plan = controller.update(times)
    assert [own.ratio for own in plan.ranks] == [0.0, 0.0]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("rule", ["makespan", "paper"])
def test_simulated_semi_settles_and_drops_less_than_zero(num_ranks, chi, rule):
    chis = [chi] + [1.0] * (num_ranks - 1)
    cluster = Cluster(
        lambda step: chis if step < 240 else [1.0] * num_ranks,
        0.2,
        0.8,
        REALISTIC,
        MigrationCost(0.005, 0.03),
        noise=0.02,
    )
    runs = {
        mode: simulate(BalanceConfig(mode=mode, semi_rule=rule), cluster, 360)
        for mode in ("zero-pridiff", "semi", "mig")
    }
    semi, zero = runs["semi"], runs["zero-pridiff"]
    assert semi.pruned_share < zero.pruned_share
    steady = list(itertools.islice(zip(semi.ratios, semi.lent, strict=True), 6, 23))
    for shares in zip(*(pruned + lent for pruned, lent in steady), strict=True):
        assert max(shares) - min(shares) <= 0.1
    assert max(semi.ratios[-1]) == max(semi.lent[-1]) == 0.0
    if rule == "makespan":
        even = Cluster(lambda step: [1.0] * num_ranks, 0.2, 0.8, REALISTIC, noise=0.02)
        homogeneous_s = sum(simulate(BalanceConfig(mode="off"), even, 230).step_s[60:]) / 170
        reachable_s = max(homogeneous_s, 0.2 + chi * 0.8 * 0.15 + 0.01)
        assert sum(semi.step_s[60:230]) / 170 <= 1.1 * reachable_s


def test_a_migration_that_takes_longer_than_it_saves_is_left():
    cluster = Cluster(lambda step: [1.3, 1.0], 0.2, 0.8, LINEAR, MigrationCost(1.0, 0.0))
    run = simulate(BalanceConfig(mode="mig"), cluster, 100)
    assert run.lent_share == 0.0
    assert math.isclose(max(run.step_s), 0.2 + 1.3 * 0.8)
