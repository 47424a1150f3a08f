"""Sequences find their strategies, and strategies are visited on the tour whose switches take least."""

import functools
import itertools

import pytest

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.length_range import LengthRange, with_limits
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.planned_switches import PlannedSwitches
from zeroresize.policy.strategy.packing import Visit, plan_visits
from zeroresize.policy.strategy.switches.switch_order import tour_seconds, visiting_order
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

DATA, TENSOR, BOTH = Strategy(4), Strategy(1, 4), Strategy(2, 2)
RANGES = [LengthRange(*one) for one in ((2, DATA), (4, TENSOR), (6, DATA, 12), (8, BOTH))]


def test_ranges_of_one_strategy_are_one_visit_and_those_without_sequences_none():
    ranges = with_limits(RANGES, None)
    assert plan_visits([5, 1, 2, 8, 6, 7], ranges) == [
        Visit(DATA, (2, 6), (((4,),), ((0,),), ((2,),), ((1,),))),
        Visit(BOTH, (8,), (((3,),), ((5,),))),
    ]
    assert plan_visits([3], ranges) == [Visit(TENSOR, (4,), (((0,),),))]
    # The range's own limit counts, and what a sequence costs decides who has it.
    assert plan_visits([6] * 5, ranges)[0].replicas == (((0, 4),), ((1,),), ((2,),), ((3,),))
    assert plan_visits([7, 8], ranges, lambda lengths: -lengths[0])[0].replicas == (((1,), (0,)), ())
    with pytest.raises(ValueError, match="sequence 1: a sequence of 9 tokens is longer"):
        plan_visits([3, 9], ranges)


def test_a_range_says_its_limit_or_all_have_one_or_the_longest_sequence_is_it():
    assert [one.max_tokens for one in with_limits(RANGES, 9)] == [9, 9, 12, 9]
    assert [one.max_tokens for one in with_limits(RANGES, None)] == [2, 4, 12, 8]
    with pytest.raises(ValueError, match="max_tokens of the length range up to 8=7 is not allowed"):
        with_limits(RANGES, 7)


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
        others = [of(one) for one in strategies if one != optimizer_strategy]
        shortest = min(tour_seconds(seconds, [of(optimizer_strategy), *one]) for one in itertools.permutations(others))
        assert tour_seconds(seconds, [of(one) for one in order]) == pytest.approx(shortest)
        without = [one for one in strategies if one != optimizer_strategy]
        assert order_of(without, overlap=False) == order[1:]  # the optimizer's is passed, though nothing is done
        hidden = [[0.0] * len(seconds) if own == of(optimizer_strategy) else row for own, row in enumerate(seconds)]
        shortest = min(tour_seconds(hidden, [of(optimizer_strategy), *one]) for one in itertools.permutations(others))
        assert tour_seconds(hidden, list(map(of, order_of(strategies, overlap=True)))) == pytest.approx(shortest)
        assert order_of(without, overlap=True) == order[1:]  # hidden only where the optimizer's trains
