"""Units that share rows: who owns them is told by counts, costs are those of the copies that there are."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import Layout
from zeroresize.plan.ownership import (
    CopyCosts,
    OwnershipMap,
    SegmentWork,
    home_counts,
    most_travelling,
    slices_of,
    unit_counts,
)
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes
from zeroresize.policy.tensor.rules.ownership import nearest_fitting, normalised


@st.composite
def works(draw):
    """A number of ranks, and a segment with blocks, of which there may be fewer than ranks."""
    num_ranks, block = draw(st.integers(2, 6)), draw(st.sampled_from([2, 3, 4, 8]))
    num_blocks = draw(st.integers(-(-num_ranks // block), 8))
    return num_ranks, SegmentWork(num_blocks * block, 1, 1.0, block=block, shared=draw(st.floats(0.05, 0.7)))


def counts_of(num_units, num_ranks):
    bounds = st.lists(st.integers(0, num_units), min_size=num_ranks - 1, max_size=num_ranks - 1).map(sorted)
    return bounds.map(lambda between: tuple(np.diff([0, *between, num_units]).tolist()))


def longest(counts, shares, work):
    return max(load / share for load, share in zip(work.loads(counts), shares, strict=True))


@given(works(), st.data())
def test_costs_are_those_of_the_map_whatever_moved_before(ranks_and_work, data):
    num_ranks, work = ranks_and_work
    owned = OwnershipMap.home(work.num_units, num_ranks, work.block)
    for counts in data.draw(st.lists(counts_of(work.num_units, num_ranks), min_size=1, max_size=4)):
        owned = owned.with_counts(counts)
        assert owned.counts == counts
        held = [len(set((owned.units_of(rank) // work.block).tolist())) for rank in range(num_ranks)]
        each, block = work.num_units / num_ranks, work.block
        expected = [
            (1.0 - work.shared) * count / each + work.shared * block * blocks / each
            for count, blocks in zip(counts, held, strict=True)
        ]
        assert work.loads(counts) == pytest.approx(expected)
        # A giver's first unit that leaves cuts a block, and so does each border between two takers.
        assert sum(held) <= sum(map(len, blocks_at_home(work, num_ranks))) + 2 * num_ranks
    assert owned.with_counts(home_counts(work.num_units, num_ranks, work.block)).is_home


def blocks_at_home(work, num_ranks):
    home = OwnershipMap.home(work.num_units, num_ranks, work.block)
    return [home.blocks_of(rank, work.block) for rank in range(num_ranks)]


@given(works())
def test_home_takes_no_block_apart_unless_there_are_fewer_than_ranks(ranks_and_work):
    num_ranks, work = ranks_and_work
    counts = home_counts(work.num_units, num_ranks, work.block)
    if work.num_units // work.block >= num_ranks:
        assert all(count % work.block == 0 for count in counts)
        assert max(counts) - min(counts) in (0, work.block)
    else:
        assert max(counts) - min(counts) in (0, 1) and min(counts) > 0


@given(works(), st.data())
def test_heads_move_only_where_that_is_shorter_than_groups_and_than_home(ranks_and_work, data):
    num_ranks, work = ranks_and_work
    shares = normalised(data.draw(st.lists(st.floats(0.2, 3.0), min_size=num_ranks, max_size=num_ranks)))
    counts = unit_counts(shares, work)
    assert sum(counts) == work.num_units
    whole = unit_counts(shares, dataclasses.replace(work, quantum=work.block))
    assert longest(counts, shares, work) <= longest(whole, shares, work) * (1.0 + 1e-9)
    home = home_counts(work.num_units, num_ranks, work.block)
    assert longest(counts, shares, work) <= longest(home, shares, work) * (1.0 + 1e-9)


@given(st.integers(2, 6), st.data())
def test_layouts_of_owners_and_of_holders_are_alike_where_each_unit_has_one(num_ranks, data):
    owners = np.array(data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=12)))
    by_owners = Layout.of_owners(owners, num_ranks)
    by_holders = Layout.of_holders([np.flatnonzero(owners == rank) for rank in range(num_ranks)])
    assert by_owners.begins.tolist() == by_holders.begins.tolist()
    assert by_owners.ends.tolist() == by_holders.ends.tolist()


@given(works(), st.data())
def test_copies_fit_into_memory(ranks_and_work, data):
    num_ranks, work = ranks_and_work
    limits = data.draw(st.lists(st.floats(2e3, 2e4), min_size=num_ranks, max_size=num_ranks))
    memory = GroupMemory(limits, [HeldBytes(100.0, 600.0)] * num_ranks, (work,))
    shares = normalised(data.draw(st.lists(st.floats(0.2, 3.0), min_size=num_ranks, max_size=num_ranks)))
    counts, held = unit_counts(shares, work), memory.bytes_by(shares)
    assert held == pytest.approx([100.0 + 600.0 * load for load in work.loads(counts)])
    assert memory.excess_by(nearest_fitting(shares, memory.most_shares)) == 0.0


@given(works().filter(lambda both: both[0] <= 4 and both[1].num_units <= 12), st.data())
def test_no_division_into_heads_is_shorter(ranks_and_work, data):
    num_ranks, work = ranks_and_work
    shares = normalised(data.draw(st.lists(st.floats(0.2, 3.0), min_size=num_ranks, max_size=num_ranks)))
    each = range(work.num_units + 1)
    all_counts = (counts for counts in itertools.product(each, repeat=num_ranks) if sum(counts) == work.num_units)
    shortest = min(longest(counts, shares, work) for counts in all_counts)
    assert longest(unit_counts(shares, work), shares, work) == pytest.approx(shortest)


@given(st.integers(2, 8), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.data())
def test_heads_are_divided_as_finely_as_slices_are_where_copies_cost_nothing(num_ranks, heads, of_group, data):
    slices = slices_of(heads * of_group, 1)
    num_units = num_ranks * heads * of_group * slices
    work = SegmentWork(num_units, 1, 1.0, block=of_group * slices, shared=0.0, slices=slices)
    shares = normalised(data.draw(st.lists(st.floats(0.2, 3.0), min_size=num_ranks, max_size=num_ranks)))
    counts = unit_counts(shares, work)
    finest = unit_counts(shares, SegmentWork(num_units, 1, 1.0))
    assert longest(counts, shares, work) <= longest(finest, shares, work) * (1.0 + 1e-9)
    assert slices == 1 or 24 < slices * heads * of_group <= 48 or slices == 16


@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_ranks_hold_whole_heads_of_which_they_compute_slices(num_ranks, heads, data):
    slices, num_sequences = 8, data.draw(st.sampled_from([None, 1, 2, 3, 8]))
    copies = CopyCosts(num_sequences=num_sequences, each_part=0.25)
    num_units = num_ranks * heads * slices
    work = SegmentWork(num_units, 1, 1.0, block=slices, shared=0.5, slices=slices, copies=copies)
    counts = data.draw(counts_of(num_units, num_ranks))
    owners = OwnershipMap.home(num_units, num_ranks, slices, slices).with_counts(counts).owners.reshape(-1, slices)
    held = [(owners == rank).any(axis=1).sum() / heads for rank in range(num_ranks)]
    assert work.loads(counts, held=True) == pytest.approx(held)
    grain = {None: 1, 1: 8, 2: 4, 3: 4, 8: 1}[num_sequences]
    of_keys = [(owners.reshape(-1, grain) == rank).any(axis=1).sum() * grain for rank in range(num_ranks)]
    expected = [(count + keys) / 2 / (heads * slices) for count, keys in zip(counts, of_keys, strict=True)]
    parts = [((owners == rank).any(axis=1) & (owners != rank).any(axis=1)).sum() / 4 for rank in range(num_ranks)]
    assert work.loads(counts) == pytest.approx(np.add(expected, parts))


def test_heads_stay_whole_whose_parts_are_slow_to_multiply():
    shares, work = (1.0, 0.6), SegmentWork(2 * 3 * 16, 1, 1.0, block=16, slices=16)
    assert unit_counts(shares, work) == (60, 36)
    slow = dataclasses.replace(work, copies=CopyCosts(each_part=0.2))
    assert unit_counts(shares, slow) == (64, 32)


def test_a_head_that_seven_ranks_take_parts_of_travels_to_each():
    work = SegmentWork(24 * 16, 1, 0.5, block=16, shared=0.5, slices=16)
    even, uneven = (1.0,) * 8, normalised((0.5,) + (1.0,) * 7)
    home = OwnershipMap.home(24 * 16, 8, 16, 16)
    owners = home.with_counts(unit_counts(uneven, work)).owners.reshape(-1, 16)
    given_heads = sum(len(set(of_head) - {0}) for of_head in owners[:3].tolist())
    assert given_heads >= 7 and most_travelling(even, uneven, [work]) == pytest.approx(0.5 * given_heads / 3)
