"""Choosing the least loaded sender many times at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.strategy.switches.senders import filled


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
