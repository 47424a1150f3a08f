"""What moves take is learned from them, by one rule for whatever had a part in it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.moves.move_cost import MoveCost, most_bytes

COST = MoveCost(0.05, 1.0)


@given(st.floats(1e-12, 1e-6), st.floats(0.0, 2.0), st.floats(1e3, 1e9))
def test_what_moves_cost_is_learned_from_them(per_byte, fixed_s, num_bytes):
    truth, cost = MoveCost(per_byte, fixed_s), MoveCost()
    for _ in range(40):
        cost = cost.learned(num_bytes, truth.seconds(num_bytes))
    assert cost.seconds(num_bytes) == pytest.approx(truth.seconds(num_bytes), rel=0.05)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(-1.0, 1.0), (1e6, -1.0), (1e6, math.nan), (math.inf, 1.0)])
def test_what_no_move_can_have_taken_teaches_nothing(num_bytes, seconds):
    assert COST.learned(num_bytes, seconds) == COST


@pytest.mark.parametrize("values", [(-1e-9, 0.0), (0.0, -1.0), (math.nan, 0.0), (0.0, math.inf), (0.0, 0.0, -1.0)])
def test_impossible_costs_are_refused(values):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        MoveCost(*values)


def test_the_price_of_a_move_is_that_of_the_way_there_and_back():
    cost = MoveCost(0.1, 1.0, setup_s=3.0)
    assert cost.seconds(20.0, 2) == 1.0 + 2.0 + 6.0
    assert cost.there_and_back(20.0, 2) == 18.0


def test_a_move_teaches_only_of_what_had_a_part_in_it():
    cost = MoveCost(1.0, 1.0, 1.0).learned(0.0, 3.0)
    assert cost.fixed_s > 2.0 and (cost.seconds_per_byte, cost.setup_s) == (1.0, 1.0)
    cost = MoveCost(1.0, 1.0, 1.0).learned(5.0, 60.0)
    assert cost.seconds_per_byte == cost.fixed_s > 5.0 and cost.setup_s == 1.0
    cost = MoveCost(1.0, 1.0, 1.0).learned(0.0, 20.0, 1)
    assert cost.setup_s == cost.fixed_s > 5.0 and cost.seconds_per_byte == 1.0
    assert MoveCost(1.0, 1.0, 1.0).learned(2.0, 4.0, 1) == MoveCost(1.0, 1.0, 1.0)
    assert MoveCost(0.0, 0.0, 0.0).learned(0.0, 2.0, 1).seconds(0.0) == 2.0


@given(st.lists(st.floats(0.0, 1e9), min_size=2, max_size=6))
def test_a_rank_that_hands_on_what_it_gets_is_as_dear_as_the_ring_by_which_links_are_measured(sizes):
    """Every rank of the ring sends and receives at once, and its seconds per byte are of what each sends."""
    assert most_bytes(sizes, [0.0] * len(sizes)) == most_bytes([0.0] * len(sizes), sizes) == max(sizes)
    assert most_bytes([sizes[0]] * 3, [sizes[0]] * 3) == sizes[0]
