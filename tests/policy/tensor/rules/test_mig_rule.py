"""How much mode "mig" moves, on plain numbers: until all ranks are busy equally long, as far as that pays."""

import pytest
from helpers.virtual_training import LINEAR, REALISTIC, balanced_s, group, rank, step_s
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulated.cluster import Cluster
from scripts.simulated.training import simulate
from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.rules.by_mode import wanted_division
from zeroresize.policy.tensor.rules.ratio import find_stragglers
from zeroresize.policy.tensor.rules.sharing import WorkDivision

MIG = BalanceConfig(mode="mig")
uneven = st.lists(st.floats(1.0, 20.0), min_size=2, max_size=9)


def division(times, slow, migration=None):
    return wanted_division(MIG, times, slow, min(rank.busy_s for rank in times), migration)


@given(chis=uneven, rest_s=st.floats(0.0, 1.0))
@settings(deadline=None)
def test_all_work_is_done_in_the_work_conserving_bound(chis, rest_s):
    times = [rank(chi, rest_s=rest_s) for chi in chis]
    bound_s = balanced_s(times)
    busy_s = [one.busy_s for one in times]
    slow = find_stragglers(busy_s, min(busy_s), 0.0, [False] * len(times))
    divided = division(times, slow)
    saved = 1.0 - bound_s / max(busy_s)
    if saved > 0.04:
        assert step_s(times, divided) == pytest.approx(bound_s, rel=5e-3)
    else:  # nothing moves for less than 0.03
        assert bound_s * 0.999 <= step_s(times, divided) <= max(busy_s) * 1.001
    assert sum(divided.pruned) == 0.0


@pytest.mark.parametrize("chi", [2.0, 8.0])
def test_no_grid_of_loans_is_faster_where_few_columns_take_longer_than_their_share(chi):
    times, slow = group(chi, 1.0, 1.3, 1.0, cost=REALISTIC)
    migration = MigrationCost(0.01, 0.02)
    divided = division(times, slow, migration)

    grid = [step / 40 for step in range(41)]
    fastest_s = min(
        step_s(times, WorkDivision((0.0,) * 4, (lent, 0.0, 0.0, 0.0), (0.0, 1.0, slower, 1.0)), migration)
        for lent in grid
        for slower in grid
    )
    assert step_s(times, divided, migration) <= fastest_s * 1.01
    shares_work = [divided.lent[rank] > 0.0 or divided.slack[rank] > 0.0 for rank in range(4)]
    ends_s = [end_s for end_s, takes_part in zip(divided.busy_s(times), shares_work, strict=True) if takes_part]
    assert len(ends_s) >= 3 and ends_s == pytest.approx([max(ends_s)] * len(ends_s), rel=0.01)


@pytest.mark.parametrize("per_share_s", [0.0, 0.3])
def test_where_moving_saves_nothing_nothing_moves(per_share_s):
    times, slow = group(1.3, 1.0, cost=LINEAR)
    unmoved_s = max(one.busy_s for one in times)
    moved = division(times, slow, MigrationCost(0.0, per_share_s))
    saving_s = unmoved_s - step_s(times, moved, MigrationCost(0.0, per_share_s))
    assert sum(division(times, slow, MigrationCost(saving_s * 1.001, per_share_s)).lent) == 0.0


def closed_loop(chi_at, believed=LINEAR, truth=LINEAR, num_ranks=8, mode="mig", steps=400, **config):
    chis = lambda step: [chi_at(step)] + [1.0] * (num_ranks - 1)  # noqa: E731
    cluster = Cluster(chis, 0.2, 0.8, truth, migration=MigrationCost(0.002, 0.002))
    return simulate(BalanceConfig(mode=mode, **config), cluster, steps, believed_cost=believed)


@pytest.mark.parametrize("chi", [100.0, 1e7])
@pytest.mark.parametrize("config", [{"mode": "mig"}, {"mode": "semi", "budget": 0.0}], ids=["mig", "semi"])
def test_a_rank_that_lent_all_it_could_is_seen_to_recover(config, chi):
    run = closed_loop(lambda step: chi if step < 100 else 1.0, steps=200, **config)
    assert run.lent[8][0] > 0.9 and run.lent[-1][0] == 0.0
