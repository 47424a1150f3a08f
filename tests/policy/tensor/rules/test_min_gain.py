"""Nothing is pruned for next to nothing: ``min_gain`` in every mode that prunes by our rules, on plain numbers."""

import itertools

import pytest
from helpers.virtual_training import rank

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.rules.by_mode import wanted_division

DEAR, CHEAP = MigrationCost(0.5, 1.0), MigrationCost(0.001, 0.005)


def few_products(num_ranks):
    """A tenth of a normal step; the last rank's take 2.5 times as long."""
    return [rank(1.0, rest_s=0.09, gemm_s=0.01)] * (num_ranks - 1) + [rank(2.5, rest_s=0.09, gemm_s=0.01)]


def division(times, migration=None, **config):
    stragglers = [False] * (len(times) - 1) + [True]
    return wanted_division(BalanceConfig(**config), times, stragglers, times[0].busy_s, migration)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("mode", ["zero-rd", "zero-pri", "zero-pridiff", "semi"])
@pytest.mark.parametrize("migration", [None, DEAR])
def test_by_default_few_products_are_not_pruned(mode, num_ranks, migration):
    divided = division(few_products(num_ranks), migration, mode=mode)
    assert sum(divided.pruned) == sum(divided.lent) == 0.0
    assert sum(division(few_products(num_ranks), migration, mode=mode, min_gain=0.0).pruned) > 0.3


def test_semi_does_what_is_exact_where_pruning_is_not_worth_it():
    times = few_products(8)
    exact = division(times, CHEAP, mode="semi", budget=0.0)
    divided = division(times, CHEAP, mode="semi", min_gain=5.0)
    assert sum(divided.pruned) == 0.0
    assert sum(divided.lent) == pytest.approx(sum(exact.lent), abs=0.01) and sum(divided.lent) > 0.3


def test_noise_around_the_threshold_does_not_make_a_rank_begin_and_stop():
    controller = Controller(BalanceConfig(mode="zero-pri", min_gain=0.215), 2)
    prunes = []
    for update in range(40):
        noise = 1.0 + 0.03 * (-1) ** update
        plan = controller.update([rank(1.0, rest_s=0.09, gemm_s=0.01), rank(2.5, rest_s=0.09, gemm_s=0.01 * noise)])
        prunes.append(plan.ranks[1].pruned > 0.0)
    assert sum(one != other for one, other in itertools.pairwise(prunes)) <= 1
