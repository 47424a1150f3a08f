"""Choosing the least loaded sender many times at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.strategy.switches.senders import filled

ROWS = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=4)


@given(ROWS, st.integers(1, 9), st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_filling_at_once_is_choosing_the_least_loaded_one_by_one(rows, size, num_times):
    loads = np.zeros((len(rows), 6), dtype=np.int64)
    is_there = np.arange(6) >= 6 - np.array(list(map(len, rows)))[:, None]  # the others' loads are 0
    loads[is_there] = np.concatenate(rows)
    times = filled(loads, is_there, size, np.array(num_times[: len(rows)]))
    assert not times[~is_there].any()
    for row, chosen, is_own, wanted in zip(rows, times, is_there, num_times, strict=False):
        expected = list(row)
        for _ in range(wanted):
            expected[int(np.argmin(expected))] += size
        assert chosen.sum() == wanted and sorted(row + chosen[is_own] * size) == sorted(expected)
