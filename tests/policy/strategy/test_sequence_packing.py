"""Sequences are packed into few micro-batches, and replicas get even work."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.strategy.packing import num_tokens, pack, spread_and_pack

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
FIGURE_2 = [500, 28000, 3600, 13500, 14500, 5000, 1500, 4000, 4500, 3200, 200, 26000, 6600, 2000, 8000, 5000]


def attention_too(lengths):
    return sum(length + 0.1 * length**2 for length in lengths)


@given(LENGTHS, st.integers(40, 90))
def test_every_sequence_is_in_one_micro_batch_that_has_room(lengths, max_tokens):
    micro_batches = pack(lengths, max_tokens)
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in one) for one in micro_batches]
    assert all(0 < size <= max_tokens for size in sizes)
    # No two could have been one: of any two the later began with a sequence that did not fit into the earlier.
    assert all(one + other > max_tokens for one, other in itertools.pairwise(sizes))
    for micro_batch in micro_batches:
        of_batch = [lengths[number] for number in micro_batch]
        assert of_batch == sorted(of_batch, reverse=True)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([num_tokens, attention_too]))
def test_replicas_differ_by_one_sequence_at_most(lengths, num_replicas, work):
    replicas = spread_and_pack(lengths, 50, num_replicas, work)
    assert len(replicas) == num_replicas
    everything = [number for replica in replicas for one in replica for number in one]
    assert sorted(everything) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in one) <= 50 for replica in replicas for one in replica)
    loads = [sum(work([lengths[number]]) for one in replica for number in one) for replica in replicas]
    assert max(loads) - min(loads) <= work([max(lengths, default=0)]) * (1 + 1e-9)


def test_the_papers_example_takes_four_micro_batches():
    assert len(pack(FIGURE_2, 32000)) == 4


def test_a_tight_fit_goes_before_a_loose_one():
    assert pack([6, 5, 4, 5], 10) == [(0, 2), (1, 3)]
    assert pack([3, 7, 8, 2], 10) == [(2, 3), (1, 0)]


def test_work_decides_who_gets_what():
    lengths = [8, 4, 4]
    assert spread_and_pack(lengths, 8, 2) == [[(0,)], [(1, 2)]]
    assert spread_and_pack([8, 4, 4, 4], 8, 2, attention_too) == [[(0,)], [(1, 2), (3,)]]
    assert spread_and_pack([5], 8, 3) == [[(0,)], [], []]
    assert spread_and_pack([], 8, 2) == [[], []]


def test_a_sequence_longer_than_a_micro_batch_is_an_error():
    for call in (lambda: pack([3, 9, 4, 10], 8), lambda: spread_and_pack([3, 9, 4, 10], 8, 2)):
        with pytest.raises(ValueError, match=r"sequences \[1, 3\] of \[9, 10\] tokens.*max_tokens=8"):
            call()
