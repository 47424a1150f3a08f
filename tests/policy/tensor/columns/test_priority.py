"""ZERO-Pri's order of columns, on plain numbers."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.plan.group import Relief
from zeroresize.policy.tensor.columns.order import pruned_of_order
from zeroresize.policy.tensor.columns.priority import ColumnPriority
from zeroresize.policy.tensor.columns.selector import ColumnSelector

statistics = st.lists(st.floats(0.0, 1e3), min_size=4, max_size=40).map(np.array)
ratios = st.floats(0.05, 0.9)
blocks = st.integers(1, 3)


def known(w_var):
    priority = ColumnPriority(len(w_var))
    priority.update(w_var, np.zeros(len(w_var), dtype=bool), incremental=True)
    return priority


@given(statistics, st.integers(1, 7), ratios, st.randoms())
def test_without_ageing_the_smallest_are_pruned_block_by_block(w_var, block, ratio, random):
    columns = len(w_var)
    tie_break = np.array(random.sample(range(columns), columns)) if block == 1 else np.arange(columns)
    order = known(w_var).order(ageing=0.0, block=block, tie_break=tie_break)
    blocks = list(dict.fromkeys(order // block))
    assert [i for b in blocks for i in range(b * block, min((b + 1) * block, columns))] == order.tolist()
    means = [w_var[b * block : (b + 1) * block].mean() for b in blocks]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(means))
    assert np.array_equal(pruned_of_order(order, ratio, block), order[: len(pruned_of_order(order, ratio, block))])


def test_a_pruned_column_keeps_what_was_known_of_it():
    priority = known(np.array([3.0, 1.0, 2.0]))
    was_pruned = np.array([False, True, False])
    priority.update(np.array([5.0, 0.0, 4.0]), was_pruned, incremental=True)
    assert priority.w_var.tolist() == [5.0, 1.0, 4.0]
    assert priority.age.tolist() == [0, 1, 0]
    priority.update(np.array([5.0, 0.5, np.nan]), was_pruned, incremental=False)
    assert priority.w_var.tolist() == [5.0, 0.5, 4.0], "a statistic that pruning does not touch is taken for all"
    assert priority.age.tolist() == [0, 2, 0]


def test_columns_of_which_nothing_is_known_go_on_being_pruned_until_they_are_old():
    priority = ColumnPriority(4)
    orders = []
    for _ in range(12):
        priority.update(np.array([9.0, 1.0, 0.0, 0.0]), np.array([False, False, True, True]), incremental=True)
        orders.append(priority.order(ageing=0.1, block=1, tie_break=np.array([3, 2, 1, 0])).tolist())
    assert orders[0] == [3, 2, 1, 0]
    assert orders[-1] == [1, 3, 2, 0], "after 12 epochs they count 12 · 0.1 · 5"


def epochs_of(selector, delta, ratio, epochs):
    """For how many epochs each column of the one layer was pruned, and for how many in a row at most, its statistic
    being ``delta`` whenever it is computed."""
    times, row, longest_row = (np.zeros(len(delta), dtype=int) for _ in range(3))
    for _ in range(epochs):
        selector.count_step(Relief(ratio, is_forced=True))
        is_pruned = np.zeros(len(delta), dtype=bool)
        is_pruned[selector.pruned_columns(Relief(ratio, is_forced=True))["layer"]] = True
        times += is_pruned
        row = np.where(is_pruned, row + 1, 0)
        longest_row = np.maximum(longest_row, row)
        selector.end_epoch({"layer": np.where(is_pruned, 0.0, delta)}, incremental=True)
    return times, longest_row


def selector_of(columns, **config):
    config = BalanceConfig(**{"mode": "zero-pri", **config})
    return ColumnSelector(config, 0, num_columns={"layer": columns}, costs={"layer": 1.0})


@settings(deadline=None)
@given(st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=4, max_size=12), ratios, st.floats(0.1, 1.0), blocks)
def test_with_ageing_no_column_is_pruned_for_ever(delta, ratio, ageing, block):
    """Constant γ, stationary δ. No δ exceeds K means, so an age of K / ageing outweighs every younger column; and each
    column that is kept becomes young, so after K epochs more all others are younger. K more until all are known."""
    columns = len(delta)
    bound = int(columns * (2 + 1 / ageing)) + 1
    _, longest_row = epochs_of(selector_of(columns, ageing=ageing, block=block), np.array(delta), ratio, 2 * bound)
    assert longest_row.max() <= bound


def test_ties_are_broken_alike_on_every_run_and_by_turns():
    frozen = np.zeros(32)
    (first, rows), (second, _) = (epochs_of(selector_of(32), frozen, 0.5, 9) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert rows.max() <= 2


def test_a_column_counts_as_pruned_if_it_was_in_most_iterations():
    selector = selector_of(10, ageing=0.0)
    selector.end_epoch({"layer": np.arange(10.0)}, incremental=True)
    for ratio in (0.8, 0.3, 0.3, 0.3, 0.8):
        selector.count_step(Relief(ratio, is_forced=True))
    selector.end_epoch({"layer": np.full(10, 50.0)}, incremental=True)
    assert selector.state.columns["layer"].w_var.tolist() == [0.0, 1.0, 2.0] + [50.0] * 7
    assert selector.pruned_steps["layer"].tolist() == [5] * 3 + [2] * 5 + [0] * 2
    for _ in range(4):
        selector.count_step(Relief(0.1, is_forced=True))
    assert sum(selector.pruned_steps["layer"]) == 25 + 4, "also those of an epoch that has not ended"
