"""Rounds that carry every unit once and obey a bound, and units that are copied to where they belong."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.resharding.parcels import Parcel, RankRounds, copy_units, plan_rounds, sent_and_received

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


@given(st.lists(parcels_of, max_size=8), st.integers(2, 300))
def test_both_ends_of_every_message_know_the_same_of_it(parcels, max_bytes):
    by_rank = [RankRounds.of(parcels, rank, max_bytes, [0] * NUM_RANKS) for rank in range(NUM_RANKS)]
    assert len({len(one.rounds) for one in by_rank}) == 1
    sent = [0] * NUM_RANKS
    for number in range(len(by_rank[0].rounds)):
        for rank, of_rank in enumerate(by_rank):
            for pair, pieces in of_rank.rounds[number].items():
                assert rank in pair and all(pieces == by_rank[peer].rounds[number][pair] for peer in pair)
                size = of_rank.message_bytes(of_rank.rounds[number])[pair]
                assert size == 0 if pair[0] == pair[1] else size == sum(of_rank.sizes(pieces))
                sent[rank] += size if pair[0] == rank else 0
    assert sent == sent_and_received(parcels, NUM_RANKS)[0]
    assert sum(sent) == sum(sent_and_received(parcels, NUM_RANKS)[1])


@given(st.data())
def test_units_are_copied_from_place_to_place_or_added(data):
    num_units = data.draw(st.integers(0, 40))
    places = [
        data.draw(st.integers(0, 5))
        if data.draw(st.booleans())
        else np.sort(np.array(data.draw(st.permutations(range(45)))[:num_units], dtype=np.int64))
        for _ in range(2)
    ]
    adds = data.draw(st.booleans())
    source, target = torch.rand(2, 45, 3), torch.rand(2, 45, 3)
    expected = target.clone()
    of, at = (np.arange(one, one + num_units) if isinstance(one, int) else one for one in places)
    for there, here in zip(at, of, strict=True):
        expected[:, there] = source[:, here] + (expected[:, there] if adds else 0.0)
    copy_units(target, places[1], source, places[0], num_units, adds=adds)
    assert torch.equal(target, expected)
