"""Choosing the least loaded sender many times at once, and cutting slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.senders import filled
from zeroresize.policy.strategy.switches.slices import common_slices


def one_by_one(loads, size, num_times):
    """The loads after each of the transfers has been given to the least loaded."""
    loads = list(loads)
    for _ in range(num_times):
        loads[int(np.argmin(loads))] += size
    return loads


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
)
def test_filling_at_once_is_choosing_the_least_loaded_one_by_one(rows, size, num_times):
    loads = np.zeros((len(rows), 6), dtype=np.int64)
    is_there = np.zeros_like(loads, dtype=bool)
    for number, row in enumerate(rows):
        loads[number, 6 - len(row) :], is_there[number, 6 - len(row) :] = row, True  # the others' loads are 0
    times = filled(loads, is_there, size, np.array(num_times[: len(rows)]))
    assert not times[~is_there].any()
    for row, chosen, is_own, wanted in zip(rows, times, is_there, num_times, strict=False):
        assert chosen.sum() == wanted
        assert sorted(row + chosen[is_own] * size) == sorted(one_by_one(row, size, wanted))


def test_slices_lie_between_the_cuts_of_both_layouts():
    tensors = [
        TensorSpec("weight", 0, (12, 5), 2, UnitDivision(0, 6, 2)),
        TensorSpec("norm", 0, (5,), 2),
        TensorSpec("nothing", 0, (0,), 2),
    ]
    thirds = Strategy(tp=3).layout(tensors, 4, 1)
    halves = Strategy(tp=2, ranks=(3, 0)).layout(tensors, 4, 1)
    slices = common_slices(thirds, halves, tensors)
    assert list(zip(slices.tensors, slices.begins, slices.ends, slices.num_bytes, strict=True)) == [
        (0, 0, 2, 40),
        (0, 2, 3, 20),
        (0, 3, 4, 20),
        (0, 4, 6, 40),
        (1, 0, 1, 10),
    ]
    held, wanted = (table[slices.patterns].astype(int).tolist() for table in (slices.held, slices.wanted))
    assert held == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
    assert wanted == [[0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize(("most_bytes", "ends"), [(10, [1, 2, 3, 4, 5]), (20, [1, 3, 5]), (49, [2, 5]), (50, [5])])
def test_slices_that_several_ranks_hold_are_cut_between_units_only(most_bytes, ends):
    tensors = [TensorSpec("weight", 0, (5, 5), 2, UnitDivision(0, 5, 1)), TensorSpec("norm", 0, (100,), 2)]
    both, single = (Strategy(dp=dp).layout(tensors, 2, 1) for dp in (2, 1))
    slices = common_slices(both, both, tensors).divided(most_bytes)
    assert slices.ends.tolist() == [*ends, 1] and slices.begins.tolist() == [0, *ends[:-1], 0]
    assert slices.num_bytes.tolist() == [*np.diff([0, *ends]) * 10, 200]
    assert common_slices(single, both, tensors).divided(most_bytes).ends.tolist() == [5, 1]  # of one holder
