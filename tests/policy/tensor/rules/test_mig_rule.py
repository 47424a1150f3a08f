"""How much mode "mig" moves, on plain numbers: until all ranks are busy equally long, as far as that pays."""

import pytest
from helpers.virtual_training import FREE, LINEAR, REALISTIC, balanced_s, group, rank, step_s
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


def division(times, slow, migration=FREE, config=MIG):
    return wanted_division(config, times, slow, min(rank.busy_s for rank in times), migration)


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


@pytest.mark.parametrize("mode", ["mig", "exact", "semi", "by the paper"])
def test_nothing_is_lent_where_nobody_can(mode):
    times, slow = group(4.0, 1.0)
    config = BalanceConfig(mode="mig", paper={"mig_rule": "paper"}) if "paper" in mode else BalanceConfig(mode=mode)
    assert any(division(times, slow, config=config).lent)
    assert not any(division(times, slow, None, config).lent)


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


@pytest.mark.parametrize("chi", [100.0, 1e7])
@pytest.mark.parametrize("config", [{"mode": "mig"}, {"mode": "semi", "budget": 0.0}], ids=["mig", "semi"])
def test_a_rank_that_lent_all_it_could_is_seen_to_recover(config, chi):
    chis = lambda step: [chi if step < 100 else 1.0] + [1.0] * 7  # noqa: E731
    run = simulate(BalanceConfig(**config), Cluster(chis, 0.2, 0.8, LINEAR, MigrationCost(0.002, 0.002)), 200)
    assert run.lent[8][0] > 0.9 and run.lent[-1][0] == 0.0
