"""Sequences find their strategies and few micro-batches, replicas get even work, and the shortest tour visits all."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.policy.strategy.costs.cost_model import PlannedSwitches
from zeroresize.policy.strategy.packing import Visit, pack, packed_sums, plan_visits, spread_and_pack
from zeroresize.policy.strategy.switches.switch_order import tour_seconds, visiting_order
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
FIGURE_2 = [500, 28000, 3600, 13500, 14500, 5000, 1500, 4000, 4500, 3200, 200, 26000, 6600, 2000, 8000, 5000]
DATA, TENSOR, BOTH = Strategy(4), Strategy(1, 4), Strategy(2, 2)
RANGES = [LengthRange(*each) for each in ((2, DATA), (4, TENSOR), (6, DATA, 12), (8, BOTH))]


@given(LENGTHS, st.integers(40, 90))
def test_every_sequence_is_in_one_micro_batch_that_has_room(lengths, max_tokens):
    micro_batches = pack(lengths, max_tokens)
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in numbers) for numbers in micro_batches]
    assert all(0 < size <= max_tokens for size in sizes)
    # No two could have been one: of any two the later began with a sequence that did not fit into the earlier.
    assert all(earlier + later > max_tokens for earlier, later in itertools.pairwise(sizes))
    for micro_batch in micro_batches:
        of_batch = [lengths[number] for number in micro_batch]
        assert of_batch == sorted(of_batch, reverse=True)


@given(LENGTHS, st.integers(1, 5))
def test_replicas_differ_by_one_sequence_at_most(lengths, num_replicas):
    replicas = spread_and_pack(lengths, 50, num_replicas)
    assert len(replicas) == num_replicas
    everything = [number for replica in replicas for numbers in replica for number in numbers]
    assert sorted(everything) == list(range(len(lengths)))
    loads = [sum(lengths[number] for numbers in replica for number in numbers) for replica in replicas]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    for replica, sums in zip(replicas, packed_sums(lengths, 50, num_replicas), strict=True):
        of_batches = [np.array([lengths[number] for number in numbers]) for numbers in replica]
        assert sums.tolist() == [[batch.sum(), (batch**2).sum()] for batch in of_batches]
        assert all(batch.sum() <= 50 for batch in of_batches)


def test_packing_is_tight_and_a_sequence_longer_than_a_micro_batch_is_an_error():
    assert len(pack(FIGURE_2, 32000)) == 4  # the paper's example
    assert pack([6, 5, 4, 5], 10) == [(0, 2), (1, 3)] and pack([3, 7, 8, 2], 10) == [(2, 3), (1, 0)]
    assert spread_and_pack([8, 4, 4], 8, 2) == [[(0,)], [(1, 2)]] and spread_and_pack([5], 8, 2) == [[(0,)], []]
    for call in (lambda: pack([3, 9, 4, 10], 8), lambda: spread_and_pack([3, 9, 4, 10], 8, 2)):
        with pytest.raises(ValueError, match=r"sequences \[1, 3\] of \[9, 10\] tokens.*max_tokens=8"):
            call()


def test_ranges_of_one_strategy_are_one_visit_and_those_without_sequences_none():
    assert plan_visits([5, 1, 2, 8, 6, 7], RANGES) == [
        Visit(DATA, (2, 6), (((4,),), ((0,),), ((2,),), ((1,),))),
        Visit(BOTH, (8,), (((3,),), ((5,),))),
    ]
    assert plan_visits([3], RANGES) == [Visit(TENSOR, (4,), (((0,),),))]
    assert plan_visits([6] * 5, RANGES)[0].replicas == (((0, 4),), ((1,),), ((2,),), ((3,),))  # the range's own limit
    with pytest.raises(ValueError, match="sequence 1: a sequence of 9 tokens is longer"):
        plan_visits([3, 9], RANGES)


def test_the_tour_is_the_shortest_from_the_optimizer_strategy_by_what_switches_send():
    tensors = [TensorSpec("a", 0, (64, 8), 4, UnitDivision(0, 64, 1)), TensorSpec("b", 1, (128, 8), 4)]
    strategies = [DATA, TENSOR, BOTH, Strategy(2, 1, 2), Strategy(1, 2, 2), Strategy(1, 1, 2, ranks=(3, 1))]
    for optimizer_strategy in strategies:
        switches = PlannedSwitches(tensors, [0, 0, 1, 1], LinkSpeeds(10.0, 1.0), num_layers=2)
        order_of = functools.partial(
            visiting_order,
            optimizer_strategy=optimizer_strategy,
            seconds_between=lambda stops, switches=switches: switches.seconds(stops, 0),
        )
        order = order_of(strategies, overlap=False)
        assert order[0] == optimizer_strategy and set(order) == set(strategies)
        of = strategies.index
        seconds = switches.seconds(strategies, of(optimizer_strategy)).tolist()
        others = [of(each) for each in strategies if each != optimizer_strategy]
        shortest = min(
            tour_seconds(seconds, [of(optimizer_strategy), *rest]) for rest in itertools.permutations(others)
        )
        assert tour_seconds(seconds, list(map(of, order))) == pytest.approx(shortest)
        without = [each for each in strategies if each != optimizer_strategy]
        assert order_of(without, overlap=False) == order[1:]  # the optimizer's is passed, though nothing is done
        hidden = [
            [0.0] * len(seconds) if row == of(optimizer_strategy) else seconds[row] for row in range(len(seconds))
        ]
        shortest = min(tour_seconds(hidden, [of(optimizer_strategy), *rest]) for rest in itertools.permutations(others))
        assert tour_seconds(hidden, list(map(of, order_of(strategies, overlap=True)))) == pytest.approx(shortest)
        assert order_of(without, overlap=True) == order[1:]  # hidden only where the optimizer's trains
