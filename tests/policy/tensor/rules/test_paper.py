"""The paper's rules: its equations against brute force."""

import pytest
from helpers.virtual_training import FREE, REALISTIC, group, migrations, rank
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.rules.paper import lending_ratios, migrated_share, num_migrating_by_benefit, semi_division


@given(st.lists(st.floats(1.2, 10), min_size=1, max_size=6), st.integers(1, 4), migrations)
def test_equation_3_is_what_a_double_loop_finds(slow_s, num_normal, migration):
    busy_s = [*sorted(slow_s, reverse=True), *[1.0] * num_normal]
    num_ranks, num_migrating = len(busy_s), 0
    for x in range(1, min(len(slow_s), num_ranks - 1) + 1):
        work = sum((busy_s[k] - 1.0) / busy_s[k] for k in range(x))
        computing_s = max(work / (num_ranks - x) * busy_s[y] for y in range(x, num_ranks))
        sending_s = migration.fixed_s * x + migration.per_share_s * work
        if busy_s[x - 1] - 1.0 - sending_s - computing_s > 0:
            num_migrating = x
    assert num_migrating_by_benefit(busy_s, len(slow_s), 1.0, migration) == num_migrating


@given(ratio=st.floats(0.05, 0.9), fixed_s=st.floats(0, 0.02), per_share_s=st.floats(0, 0.1))
def test_the_share_of_equation_2_balances_both_overheads(ratio, fixed_s, per_share_s):
    straggler, migration = rank(4.0, REALISTIC), MigrationCost(fixed_s, per_share_s)
    beta = migrated_share(straggler, ratio, migration, normal_gemm_s=0.8, num_ranks=4)

    def excess(share):
        resizing_s = REALISTIC.gather_fill_at(ratio * (1 - share))
        return resizing_s - migration.seconds([ratio * share]) - 0.8 * ratio * share / 3

    assert 0.0 <= beta <= 1.0
    assert excess(max(beta - 1e-3, 1e-9)) >= -1e-3 or beta == 0.0
    assert excess(min(beta + 1e-3, 1.0)) <= 1e-3


def test_forced_numbers_of_migrating_ranks_go_from_resizing_to_migrating_only():
    times, slow = group(8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    for count in range(5):
        division = semi_division(times, slow, 1.0, FREE, 0.9, num_migrating=count)
        assert [share > 0 for share in division.lent] == [place < count for place in range(8)]
        assert all(pruned + lent <= 0.9 + 1e-9 for pruned, lent in zip(division.pruned, division.lent, strict=True))
        assert [share > 0.02 for share in division.pruned[count:4]] == [True] * (4 - count)


def test_what_remains_to_resize_aims_at_the_normal_ranks_with_the_work_they_took_in():
    times, slow = group(8.0, 2.0, 1.0, 1.0)
    division = semi_division(times, slow, 1.0, FREE, 0.9, num_migrating=1)
    busy = division.busy_s(times)
    assert busy[1] == pytest.approx(max(busy[2], busy[3]), rel=1e-6)


def test_the_papers_rule_is_equation_1_with_the_fastest_time():
    times = [rank(1.0), rank(2.0), rank(1.0, rest_s=5.0, gemm_s=0.1)]
    assert lending_ratios(times, [False, True, True], 1.0) == [0.0, pytest.approx(0.8 / 1.6), 1.0]
