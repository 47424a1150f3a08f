"""Switches that overlap with training: what they prolong a step by, and what they hold, beside numbers by hand."""

import pytest

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.forecast import forecast_step, packed_by_work
from zeroresize.policy.strategy.costs.layer_cost_table import LayerCost, LayerCostTable
from zeroresize.policy.strategy.costs.overlap import OverlappedSwitches
from zeroresize.policy.strategy.switches.switch_order import hide_first_switch
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

#: A weight of 8 units of 50 bytes in 16 bits, 400 bytes together.
TENSORS = (TensorSpec("weight", 0, (8, 25), 2, UnitDivision(0, 8, 1)),)
LAYERS = LayerCostTable(("block",), {"block": {tp: LayerCost(0.0, 1.0 / tp, 0.0, 12.0 / tp) for tp in (1, 2, 4)}}, 10.0)
COST = CostModel(LAYERS, TENSORS, (0,) * 4, LinkSpeeds(1000.0, 100.0), optimizer_ratio=6.0)
COPIES, SHARDS, BOTH = Strategy(4), Strategy(1, 4), Strategy(2, 2)
#: Three quarters of a copy to each rank; of its quarter's gradient three parts in 32 bits to each.
WEIGHTS_S, GRADIENTS_S = 0.3, 0.6
#: Of the halves of two replicas: who has no part of its quarter gets two parts of it.
GRADIENTS_OF_BOTH_S = 0.4
ENOUGH = [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("visits", "work_s", "prolonged_s"),
    [
        ([SHARDS], ENOUGH, 0.0),
        ([SHARDS, COPIES], ENOUGH, GRADIENTS_S),  # the last gradients; no weights come back
        ([SHARDS, COPIES], [0.1, 10.0], WEIGHTS_S - 0.1 + GRADIENTS_S),
        ([COPIES], ENOUGH, WEIGHTS_S + GRADIENTS_S),  # behind nothing
        ([SHARDS, COPIES, BOTH], ENOUGH, GRADIENTS_OF_BOTH_S),  # halves of what is there already
        ([SHARDS, COPIES, BOTH], [10.0, 10.0, 0.2], GRADIENTS_S - 0.2 + GRADIENTS_OF_BOTH_S),
    ],
)
def test_what_travels_beside_training_costs_nothing_but_what_is_left_of_it(visits, work_s, prolonged_s):
    switches = OverlappedSwitches(COST, SHARDS)
    assert switches.seconds(visits, work_s[: len(visits)], [10] * len(visits)) == pytest.approx(prolonged_s)


def test_gradients_that_travel_in_16_bits_take_half():
    switches = OverlappedSwitches(COST, SHARDS, gradient_itemsize=2)
    assert switches.seconds([SHARDS, COPIES], [9.0] * 2, [10] * 2) == pytest.approx(GRADIENTS_S / 2)


def test_what_has_no_room_beside_training_travels_at_the_switch():
    """Under shards: weights and gradients in 16 and 32 bits, state, activations; copies, and messages of 300 bytes."""
    needed = 100 + 200 + 600 + 10 * 3 + 400 + 2 * 300
    for limit, seconds in ((needed, GRADIENTS_S), (needed - 1, WEIGHTS_S + GRADIENTS_S)):
        switches = OverlappedSwitches(COST, SHARDS, limit_bytes=limit)
        assert switches.seconds([SHARDS, COPIES], [9.0] * 2, [10] * 2) == pytest.approx(seconds)


def test_gradients_without_room_travel_in_the_messages_of_weights_that_have_none_either():
    switches = OverlappedSwitches(COST, SHARDS, limit_bytes=0.0)
    # From copies to both no weights travel.
    together = WEIGHTS_S + GRADIENTS_S + GRADIENTS_OF_BOTH_S
    assert switches.seconds([SHARDS, COPIES, BOTH], ENOUGH, [10] * 3) == pytest.approx(together)
    # To both: rank 1 has nothing of the half that it gets. Then half of a copy to each rank, beside the parts of both.
    fused = 0.2 + (0.2 + GRADIENTS_OF_BOTH_S) + GRADIENTS_S
    assert switches.seconds([SHARDS, BOTH, COPIES], ENOUGH, [10] * 3) == pytest.approx(fused)


def test_memory_counts_gradients_of_both_strategies_in_32_bits():
    copies = 400 + 800 + 10 * 12  # weights, gradients, activations
    of_optimizer = 200 + 600  # gradients, master weights with Adam's state
    for limit in (copies + of_optimizer, copies + of_optimizer - 1):
        switches = OverlappedSwitches(COST, SHARDS, limit_bytes=limit)
        assert switches.fits(COPIES, 10) == (limit == copies + of_optimizer)
        assert not switches.fits(COPIES, 10, beside=1.0)


def test_the_sum_over_the_replicas_is_of_gradients_as_they_are_held():
    assert OverlappedSwitches(COST, COPIES).reduction_seconds() == pytest.approx(2 * COST.reduction_seconds(COPIES))


def test_the_strategy_whose_weights_are_many_comes_first_where_that_is_hidden():
    strategies = [SHARDS, BOTH, COPIES]
    switches = OverlappedSwitches(COST, SHARDS)
    assert switches.order(strategies) == [SHARDS, COPIES, BOTH]
    assert set(switches.order([BOTH, COPIES])) == {BOTH, COPIES}
    hidden = hide_first_switch([[0.0, 5.0, float("inf")], [1.0, 0.0, 2.0], [3.0, 4.0, 0.0]], 0)
    assert hidden.tolist() == [[0.0, 0.0, float("inf")], [1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]


def test_a_step_is_forecast_with_its_work_and_what_is_left_of_the_switches():
    ranges, sample = [LengthRange(4, COPIES), LengthRange(16, SHARDS)], [[4, 4, 4, 4, 16]]
    forecast = forecast_step(ranges, SHARDS, sample, COST, packed_by_work, overlap=OverlappedSwitches(COST, SHARDS))
    assert forecast.range_s == pytest.approx((4.0, 4.0))
    assert forecast.switch_s == pytest.approx(GRADIENTS_S) and forecast.reduction_s == 0.0
    assert forecast.step_s == pytest.approx(8.0 + GRADIENTS_S)
