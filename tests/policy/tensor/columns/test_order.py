"""Orders of columns, and how many of them a share is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.columns.order import (
    ALIGNMENT,
    decided_columns,
    num_lent,
    order_of_homes,
    order_without_priority,
    pruned_of_order,
    random_order,
)


@given(st.integers(1, 200), st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_pruned_columns_are_whole_blocks_and_leave_some(num_columns, block, ratio):
    order = random_order(num_columns, block=block, seed=0, epoch=0, rank=0, layer=0)
    pruned = pruned_of_order(order, ratio, block)
    kept = order[len(pruned) :]
    assert len(kept) >= 1
    assert set(pruned // block).isdisjoint(kept // block)
    if num_columns > block:
        wanted = min(ratio, 1 - block / num_columns) * num_columns
        short = -num_columns % block  # missing in the last block
        assert wanted - block / 2 - short <= len(pruned) <= ratio * num_columns + block / 2


@given(st.integers(1, 4096), st.floats(0, 1, exclude_max=True), st.floats(0.1, 0.95))
def test_what_a_controller_decides_keeps_a_multiple_of_eight_columns_where_there_are_enough(k, ratio, max_ratio):
    ratio = min(ratio, max_ratio)
    num_pruned = len(decided_columns(np.arange(k), ratio, 1, max_ratio))
    assert num_pruned <= max_ratio * k + 1e-9
    assert abs(num_pruned / k - ratio) <= max(0.025, 1 / k) + 1e-9
    nearest = max(round((1 - ratio) * k / 8) * 8, 0)
    if ratio > 0.0 and k - nearest <= max_ratio * k and abs(1 - nearest / k - ratio) < 0.024:
        assert (k - num_pruned) % ALIGNMENT == 0 or num_pruned == 0


@given(st.integers(2, 4096), st.floats(0.0, 1.0))
def test_a_loan_that_was_decided_leaves_something_to_tell_the_owners_speed_by(num_columns, ratio):
    decided = num_lent(num_columns, ratio, is_forced=False)
    assert 0 <= decided < num_columns
    if num_columns >= 2 * ALIGNMENT:
        assert num_columns - decided >= ALIGNMENT
    assert decided == pytest.approx(min(ratio * num_columns, num_columns - ALIGNMENT), abs=0.025 * num_columns + 8.5)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3), st.sampled_from(["zero-rd", "mig"]))
def test_a_rank_that_holds_its_own_columns_has_the_order_that_it_has_without_moves(num_columns, block, rank, mode):
    config = BalanceConfig(mode=mode, **({} if mode == "mig" else {"block": block}))
    homes = rank * num_columns + np.arange(num_columns)
    expected = order_without_priority(config, num_columns, epoch=2, rank=rank, layer=1)
    assert order_of_homes(config, homes, num_columns, epoch=2, layer=1).tolist() == expected.tolist()


@given(st.lists(st.integers(0, 47), unique=True), st.lists(st.integers(0, 47), unique=True), st.integers(1, 7))
def test_columns_keep_their_order_whoever_else_comes_or_goes(first, second, block):
    """Of three ranks with 16 columns each at home. Blocks are of what lies together, so they may change."""

    def order(held, block=1):
        homes = np.array(sorted(held), dtype=np.int64)
        positions = order_of_homes(BalanceConfig(mode="zero-rd", block=block), homes, 16, epoch=1, layer=0)
        assert sorted(positions) == list(range(len(held)))
        return homes[positions].tolist()

    both = set(first) & set(second)
    assert [one for one in order(first) if one in both] == [one for one in order(second) if one in both]
    order(first, block)
