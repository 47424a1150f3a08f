"""The order of strategies within a step, and the ranges of lengths that lead to them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.strategy import LengthRange, Strategy, as_ranges, range_of
from zeroresize.policy.strategy.switches.switch_order import cheapest_order, tour_seconds


@settings(max_examples=30)
@given(size=st.integers(1, 6), seed=st.integers(0, 10**6), data=st.data())
def test_no_order_is_cheaper(size, seed, data):
    seconds = np.random.default_rng(seed).uniform(0.0, 1.0, (size, size)).round(2)
    start = data.draw(st.integers(0, size - 1))
    order = cheapest_order(seconds, start)
    assert order[0] == start and sorted(order) == list(range(size))
    others = [one for one in range(size) if one != start]
    every = [tour_seconds(seconds, (start, *own)) for own in itertools.permutations(others)]
    assert tour_seconds(seconds, order) == pytest.approx(min(every), abs=1e-12)


def test_ways_that_are_dear_or_not_possible_are_avoided():
    # The ring 0 -> 2 -> 1 -> 0 is nearly free, the other way round dear.
    assert cheapest_order([[0, 9, 1], [1, 0, 9], [9, 1, 0]], start=0) == [0, 2, 1]
    assert cheapest_order([[0, 9, 1], [1, 0, 9], [9, 1, 0]], start=1) == [1, 0, 2]
    assert tour_seconds([[0, 9, 1], [1, 0, 9], [9, 1, 0]], [0, 1, 2]) == 27
    assert cheapest_order([[0, 1, np.inf], [9, 0, 9], [1, 9, 0]], start=0) == [0, 1, 2]
    for seconds, message in (
        ([[0, np.inf], [1, 0]], "no order of the"),
        (np.ones((13, 13)), "13 strategies are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            cheapest_order(seconds, 0)


def test_ranges_rise_and_every_length_has_one():
    ranges = as_ranges([LengthRange(8, Strategy(dp=2)), {"up_to": 32, "strategy": [1, 2, 1]}])
    assert as_ranges([own.as_dict() for own in ranges]) == ranges
    assert [range_of(ranges, length) for length in (1, 8, 9, 32)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="33 tokens is longer than the last length range: up to 32"):
        range_of(ranges, 33)


def test_ranges_of_another_kind_are_refused():
    for ranges, message in (
        ([], "at least one"),
        ([LengthRange(8, Strategy()), LengthRange(8, Strategy())], "larger up_to"),
        ([{"up_to": 0, "strategy": [1, 1, 1]}], "up_to=0 is not allowed"),
        ([{"up_to": 8}], r"\['strategy'\] are missing"),
        ([{"upto": 8, "strategy": [1, 1, 1]}], "did you mean 'up_to'"),
    ):
        with pytest.raises(ValueError, match=message):
            as_ranges(ranges)
