"""How much mode "mig" moves, on plain numbers: until all ranks are busy equally long, as far as that pays."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uneven_groups import LINEAR, REALISTIC, balanced_s, group, rank, step_s

from zeroresize.config import BalanceConfig
from zeroresize.policy.cost_model import MigrationCost
from zeroresize.policy.rules import wanted_division
from zeroresize.policy.sharing import Division

MIG = BalanceConfig(mode="mig")
uneven = st.lists(st.floats(1.0, 20.0), min_size=2, max_size=9)


def division(times, slow, migration=None, **changes):
    return wanted_division(MIG, times, slow, min(rank.busy_s for rank in times), migration, **changes)


@given(chis=uneven, rest_s=st.floats(0.0, 1.0))
@settings(deadline=None)
def test_all_work_is_done_in_the_work_conserving_bound(chis, rest_s):
    times = [rank(chi, rest_s=rest_s) for chi in chis]
    bound_s = balanced_s(times)
    found = division(times, [one.busy_s > bound_s for one in times])
    saved = 1.0 - bound_s / max(one.busy_s for one in times)
    if saved > 0.04:  # nothing moves for less than 0.03
        assert step_s(times, found) == pytest.approx(bound_s, rel=5e-3)
    assert sum(found.pruned) == 0.0


@pytest.mark.parametrize(("num_ranks", "chi"), [(2, 2.0), (2, 8.0), (8, 2.0), (8, 8.0), (8, 40.0)])
def test_one_straggler_has_the_bound_in_closed_form(num_ranks, chi):
    """T* = R + M e / Σ 1/χ_i; at the last of these the straggler hands over more than γ_max."""
    times, slow = group(chi, *[1.0] * (num_ranks - 1))
    found = division(times, slow)
    assert step_s(times, found) == pytest.approx(0.2 + 0.8 * num_ranks / (num_ranks - 1 + 1 / chi), rel=5e-3)
    assert found.lent[0] == pytest.approx(1.0 - num_ranks / (num_ranks - 1 + 1 / chi) / chi, abs=3e-3)


def test_only_stragglers_lend():
    times = [rank(1.0), rank(1.05), rank(4.0)]
    found = division(times, [False, False, True])
    assert found.lent[:2] == (0.0, 0.0) and 0.5 < found.lent[2] < 0.8


@pytest.mark.parametrize("chi", [2.0, 8.0])
def test_no_grid_of_loans_is_faster_where_few_columns_take_longer_than_their_share(chi):
    times, slow = group(chi, 1.0, 1.3, 1.0, cost=REALISTIC)
    migration = MigrationCost(0.01, 0.02)
    found = division(times, slow, migration)

    grid = [step / 40 for step in range(41)]
    fastest_s = min(
        step_s(times, Division((0.0,) * 4, (lent, 0.0, 0.0, 0.0), (0.0, 1.0, slower, 1.0)), migration)
        for lent in grid
        for slower in grid
    )
    assert step_s(times, found, migration) <= fastest_s * 1.01
    ends_s = [end_s for end_s, taken in zip(found.busy_s(times), found.room, strict=True) if taken > 0.0]
    assert ends_s == pytest.approx([max(ends_s)] * len(ends_s), rel=5e-3)


def test_where_moving_saves_too_little_nothing_moves_and_what_moves_stays_for_noise():
    times, slow = group(1.1, 1.0, cost=LINEAR)
    unmoved_s = max(one.busy_s for one in times)
    saving = unmoved_s - step_s(times, division(times, slow))
    dear = MigrationCost(saving, 0.0)  # moving pays back nothing
    assert sum(division(times, slow, dear).lent) == 0.0
    assert sum(division(times, slow, dear, lend_now=[True, False]).lent) > 0.0
