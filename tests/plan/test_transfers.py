"""Layouts as lists of runs, and what travels between two of them: all that is wanted, once, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import Layout, TensorSpec, UnitDivision
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.plan.strategy import Strategy
from zeroresize.plan.transfers import common_slices, transfers


@st.composite
def two_owners(draw):
    ranks = draw(st.integers(1, 6))
    units = draw(st.integers(1, 40))
    owners = st.lists(st.integers(0, ranks - 1), min_size=units, max_size=units)
    return ranks, *(np.array(draw(owners), dtype=np.int64) for _ in range(2))


@given(two_owners())
def test_units_that_change_owners_travel_and_no_others(drawn):
    num_ranks, before, after = drawn
    layouts = [Layout.of_owners(owners, num_ranks) for owners in (before, after)]
    for owners, layout in zip((before, after), layouts, strict=True):
        units = np.arange(len(owners))
        for rank in range(num_ranks):
            begins, ends = (runs[:, rank, None] for runs in layout.rows_of(0))
            assert np.array_equal(((begins <= units) & (units < ends)).sum(axis=0), owners == rank)
    pairs = transfers(*layouts).units_by_pair()
    owners = before.copy()
    for (source, destination), units in pairs.items():
        assert source != destination and len(units) and np.all(np.diff(units) > 0)
        assert np.all(before[units] == source)
        owners[units] = destination
    assert np.array_equal(owners, after)
    assert sum(map(len, pairs.values())) == np.count_nonzero(before != after)
    assert list(pairs) == sorted(pairs)


def test_layouts_of_other_units_or_ranks_are_an_error():
    def layout(num_units, num_ranks):
        return Layout.of_owners(OwnershipMap.home(num_units, num_ranks).owners, num_ranks)

    with pytest.raises(ValueError, match="no rank holds all units of 0"):
        transfers(layout(8, 2), layout(10, 2))
    with pytest.raises(ValueError, match="do not belong together"):
        transfers(layout(8, 2), layout(8, 4))


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


def test_slices_that_several_ranks_hold_are_cut_between_units_only():
    tensors = [TensorSpec("weight", 0, (5, 5), 2, UnitDivision(0, 5, 1)), TensorSpec("norm", 0, (100,), 2)]
    both, single = (Strategy(dp=dp).layout(tensors, 2, 1) for dp in (2, 1))
    for most_bytes, ends in ((10, [1, 2, 3, 4, 5]), (20, [1, 3, 5]), (49, [2, 5]), (50, [5])):
        slices = common_slices(both, both, tensors).divided(most_bytes)
        assert slices.ends.tolist() == [*ends, 1] and slices.begins.tolist() == [0, *ends[:-1], 0]
        assert slices.num_bytes.tolist() == [*np.diff([0, *ends]) * 10, 200]
    assert common_slices(single, both, tensors).divided(10).ends.tolist() == [5, 1]  # of one holder
