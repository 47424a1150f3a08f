"""Streams are cut into rounds that hold what they may, and arrive whole."""

from hypothesis import given
from hypothesis import strategies as st

from zeroresize.resharding.byte_rounds import byte_rounds, pieces_of

PAIRS = [(one, other) for one in range(4) for other in range(4) if one != other]


@given(st.dictionaries(st.sampled_from(PAIRS), st.integers(0, 50)), st.integers(1, 40))
def test_rounds_carry_every_byte_once_in_order_and_no_rank_more_than_allowed(streams, max_bytes):
    carried = dict.fromkeys(streams, 0)
    for round_ in byte_rounds(streams, max_bytes):
        load = dict.fromkeys(range(4), 0)
        for pair, (begin, end) in round_.items():
            assert begin == carried[pair] < end
            carried[pair] = end
            for rank in pair:
                load[rank] += end - begin
        assert 0 < max(load.values()) <= max_bytes
    assert carried == streams


@given(st.lists(st.integers(0, 9), min_size=1), st.data())
def test_pieces_cover_a_range_of_the_stream(sizes, data):
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    stream = [(number, byte) for number, size in enumerate(sizes) for byte in range(size)]
    pieces = [(number, byte) for number, first, last in pieces_of(sizes, begin, end) for byte in range(first, last)]
    assert pieces == stream[begin:end]
