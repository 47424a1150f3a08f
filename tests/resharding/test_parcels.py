"""Rounds that carry every unit once and obey a bound, and units that are copied to where they belong."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.resharding.parcels import Parcel, plan_rounds

NUM_RANKS = 4
PAIRS = list(itertools.product(range(NUM_RANKS), repeat=2))
parcels_of = st.builds(
    Parcel,
    st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3, unique=True).map(tuple),
    st.integers(0, 30),
    st.integers(0, 9),
    st.sampled_from([torch.float64, torch.bfloat16, torch.uint8]),
    st.integers(0, 2),
)


@given(st.lists(parcels_of, max_size=8), st.integers(1, 300))
def test_rounds_carry_every_unit_once_and_no_rank_more_than_allowed(parcels, max_bytes):
    carried, turns = [0] * len(parcels), []
    for pieces in plan_rounds(parcels, max_bytes):
        loads, units = [0] * NUM_RANKS, [0] * NUM_RANKS
        assert pieces == sorted(pieces, key=lambda piece: -parcels[piece.parcel].dtype.itemsize)  # so all lie aligned
        for number, begin, end in pieces:
            assert begin == carried[number] < end
            carried[number] = end
            ranks = [rank for pair in parcels[number].routes if pair[0] != pair[1] for rank in pair]
            for rank in ranks:
                loads[rank] += (end - begin) * parcels[number].unit_bytes
            for rank in set(ranks):
                units[rank] += end - begin
        turns += {parcels[piece.parcel].turn for piece in pieces}
        assert all(load <= max_bytes or unit == 1 for load, unit in zip(loads, units, strict=True))  # one may be larger
    assert carried == [parcel.num_units if parcel.num_bytes else 0 for parcel in parcels]
    assert turns == sorted(turns)
