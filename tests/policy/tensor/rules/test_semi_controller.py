"""SEMI update after update: what it learns, noise, changes, states, simulated clusters."""

import pytest
from helpers.states import resumed
from helpers.virtual_training import REALISTIC, group, rank
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulated.cluster import Cluster
from scripts.simulated.training import simulate
from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes, CommunicationEstimate


def test_the_cost_of_migrating_is_learned_from_training():
    estimate = CommunicationEstimate()
    calibrated, true_factor = MigrationCost(0.1, 0.4), 1.7
    estimate.learn(CollectiveTimes(0.05, (0.0, 0.0), calibrated), busy_s=0.5)
    for _ in range(6):
        waited_s = 0.05 + true_factor * calibrated.seconds([0.5])
        estimate.learn(CollectiveTimes(waited_s, (0.5, 0.0), calibrated), busy_s=0.5)
    assert estimate.without_loans_s == pytest.approx(0.05)
    assert estimate.migration.seconds([0.25]) == pytest.approx(true_factor * calibrated.seconds([0.25]), rel=0.1)

    assert resumed(estimate) == estimate


def lent_and_pruned(run):
    return [[*pruned, *lent] for pruned, lent in zip(run.ratios, run.lent, strict=True)]


@pytest.mark.few(2)
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


#: Handing over what χ = 2 of two ranks asks for saves half a second of 1.8.
DEAR = MigrationCost(1.0)


def lending_while_it_costs(factors):
    """Whether anything is lent after every update, while migrating costs these multiples of what the calibration
    told."""
    controller, calibrated = Controller(BalanceConfig(mode="mig"), 2), DEAR.scaled(0.2)
    times, _ = group(2.0, 1.0)
    lends = []
    for factor in factors:
        lent = tuple(own.lent for own in controller.current_plan().ranks)
        seen = CollectiveTimes(factor * calibrated.seconds(lent), lent, calibrated)
        lends.append(bool(controller.update(times, seen).loans))
    return lends


@pytest.mark.few(1)
@pytest.mark.parametrize("num_dear", [20, 600])
def test_where_the_network_becomes_cheap_again_lending_comes_back(num_dear):
    """Within a hundred updates, or as many as it was dear; after a bad hour later on, within a hundred again."""
    num_cheap, brief, num_after = num_dear + 100, 10, 100
    lends = lending_while_it_costs([5.0] * num_dear + [1.0] * num_cheap + [5.0] * brief + [1.0] * num_after)
    assert not lends[num_dear - 1] and lends[num_dear + num_cheap - 1]
    assert not lends[-num_after] and lends[-1]


@settings(max_examples=30, deadline=None)
@given(
    chis=st.lists(st.lists(st.sampled_from([1.0, 1.3, 2.0, 4.0, 8.0]), min_size=3, max_size=3), min_size=3, max_size=8),
    costs=st.lists(st.sampled_from([MigrationCost(), MigrationCost(0.05, 0.2), MigrationCost(0.3, 1.0)]), min_size=8),
    budget=st.sampled_from([0.05, 0.2, 0.5]),
    mode=st.sampled_from(["semi", "zero-pri"]),
)
def test_the_budget_holds_on_the_way_from_one_division_to_another(chis, costs, budget, mode):
    config = BalanceConfig(mode=mode, budget=budget)
    controller = Controller(config, 3)
    for speeds, migration in zip(chis, costs, strict=False):
        lent = tuple(one.lent for one in controller.current_plan().ranks)
        plan = controller.update([rank(chi) for chi in speeds], CollectiveTimes(0.0, lent, migration))
        assert sum(one.pruned for one in plan.ranks) <= 3 * budget + 1e-9
        assert resumed(controller).current_plan().ranks == plan.ranks
