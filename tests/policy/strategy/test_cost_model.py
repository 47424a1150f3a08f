"""What the cost model says of strategies, beside pipelines simulated operation by operation and volumes by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel, LayerCost, LayerCostTable, pipeline_seconds
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.runtime.schedules import orders_of
from zeroresize.runtime.simulated_steps import simulated_step, timeline

NUM_LAYERS = 4
#: A weight of 8 units of 100 bytes in each layer, and a bias of 8 bytes that nobody divides.
TENSORS = tuple(
    tensor
    for layer in range(NUM_LAYERS)
    for tensor in (
        TensorSpec(f"{layer}.weight", layer, (8, 25), 4, UnitDivision(0, 8, 1)),
        TensorSpec(f"{layer}.bias", layer, (2,), 4),
    )
)
LAYERS = LayerCostTable(
    ("block",) * NUM_LAYERS, {"block": {tp: LayerCost(1.0, 8.0 / tp, 0.5 / tp, 12.0 / tp) for tp in (1, 2, 4)}}, 10.0
)
LINKS = LinkSpeeds(within_bytes_per_s=1000.0, between_bytes_per_s=100.0)
ONE_NODE = CostModel(LAYERS, TENSORS, (0,) * 4, LINKS)


def simulated_1f1b(stage_s):
    """Seconds of micro-batches of any size: a third of each is its forward; messages take no time."""
    num_batches, num_stages = stage_s.shape
    return timeline(orders_of("1f1b", num_stages, num_batches), stage_s / 3, stage_s * 2 / 3).step_s


@pytest.mark.parametrize(("num_stages", "num_batches"), [(1, 3), (2, 2), (4, 4), (4, 11)])
def test_a_pipeline_of_equal_stages_takes_what_its_schedule_takes(num_stages, num_batches):
    equal = simulated_step([1.0] * num_stages, [2.0] * num_stages, num_batches).step_s
    assert pipeline_seconds(np.full((num_batches, num_stages), 3.0)) == pytest.approx(equal)
    assert simulated_1f1b(np.full((num_batches, num_stages), 3.0)) == pytest.approx(equal)


@settings(max_examples=40)
@given(num_stages=st.integers(1, 4), more=st.integers(0, 12), spread=st.floats(0.0, 1.0), seed=st.integers(0, 10**6))
def test_micro_batches_of_different_sizes_take_about_that_too(num_stages, more, spread, seed):
    generator = np.random.default_rng(seed)
    sizes = generator.uniform(1.0 - spread / 2, 1.0 + spread / 2, num_stages + more)
    stage_s = np.outer(sizes, np.ones(num_stages))
    predicted, simulated = pipeline_seconds(stage_s), simulated_1f1b(stage_s)
    assert predicted >= stage_s.sum(axis=0).max()
    assert 0.8 <= predicted / simulated <= 1.2


def test_a_slow_stage_is_what_all_wait_for():
    stage_s = np.tile([1.0, 3.0, 1.0], (6, 1))
    assert pipeline_seconds(stage_s) == 6 * 3.0 + 2.0
    assert pipeline_seconds(np.zeros((0, 3))) == 0.0


def sums(*batches):
    """Of the micro-batches of a replica, as lengths of their sequences."""
    return np.array([(sum(batch), sum(length**2 for length in batch)) for batch in batches], float).reshape(-1, 2)


def test_work_is_that_of_the_slowest_replica():
    # 4 layers: 4 (1 + 8 T + Σ length² / 2).
    alone = 4 * (1.0 + 8.0 * 5 + 0.5 * (4 + 9))
    assert ONE_NODE.work_seconds(Strategy(), [sums((2, 3))]) == pytest.approx(alone)
    assert ONE_NODE.work_seconds(Strategy(dp=2), [sums((2, 3)), sums((1,), (1,))]) == pytest.approx(alone)
    assert ONE_NODE.work_seconds(Strategy(dp=2), [sums(), sums()]) == 0.0
    with pytest.raises(ValueError, match="2 replicas: micro-batches are for 1"):
        ONE_NODE.work_seconds(Strategy(dp=2), [sums((2, 3))])
    with pytest.raises(ValueError, match=r"no costs for tp=8: there are those of tp in \[1, 2, 4\]"):
        CostModel(LAYERS, TENSORS, (0,) * 8, LINKS).work_seconds(Strategy(tp=8), [sums((2, 3))])


def test_stages_hand_on_activations_and_a_slow_rank_holds_up_its_group():
    stage = 2 * (1.0 + 8.0 * 5 + 0.5 * 25)
    message = 2 * 10.0 * 5 / 1000.0
    batches = [sums((5,), (5,), (5,))]
    assert ONE_NODE.work_seconds(Strategy(pp=2), batches) == pytest.approx((3 + 1) * (stage + message / 2))
    apart = CostModel(LAYERS, TENSORS, (0, 1), LINKS)
    assert apart.work_seconds(Strategy(pp=2), batches) == pytest.approx((3 + 1) * (stage + 10 * message / 2))

    slow = CostModel(LAYERS, TENSORS, (0,) * 4, LINKS, slowness=(1.0, 1.0, 1.0, 3.0))
    even, uneven, pair, batch = Strategy(tp=4), Strategy(tp=4, shares=(3, 3, 3, 1)), Strategy(tp=2), [sums((5,))]
    normal = ONE_NODE.work_seconds(even, batch)
    assert slow.work_seconds(even, batch) == pytest.approx(3.0 * normal)
    assert slow.work_seconds(uneven, batch) == pytest.approx(1.2 * normal)
    assert slow.work_seconds(pair, batch) == ONE_NODE.work_seconds(pair, batch)


def test_switches_carry_weights_on_and_gradients_to_the_optimizer_strategy():
    # Rank 0 has all 3,232 bytes under the optimizer's; tp=2 splits the 3,200 of the weights, each rank has the biases.
    strategies = [Strategy(), Strategy(tp=2)]
    seconds = ONE_NODE.switches.seconds(strategies, optimizer_strategy=0)
    assert seconds[0, 1] == pytest.approx((1600 + 32) / 1000)
    # Back: what rank 0 holds already does not travel, of the weights or of the gradients; biases' gradients are whole.
    assert seconds[1, 0] == pytest.approx((1600 + 1600) / 1000)
    assert ONE_NODE.switches.seconds(strategies, optimizer_strategy=1)[1, 0] == pytest.approx(1600 / 1000)
    assert ONE_NODE.reduction_seconds(Strategy(dp=2)) == pytest.approx(3232 / 1000)
    assert ONE_NODE.reduction_seconds(Strategy(tp=2)) == 0.0
    two_nodes = CostModel(LAYERS, TENSORS, (0, 1), LINKS)
    assert two_nodes.reduction_seconds(Strategy(dp=2)) == pytest.approx(3232 / 100)


def test_memory_is_what_the_optimizer_strategy_needs_and_what_is_in_force():
    optimizer_strategy, other = Strategy(tp=4), Strategy(pp=2, dp=2)
    quarter, half = 800 + 32, 2 * (800 + 8)
    of_optimizer = ONE_NODE.memory_bytes(optimizer_strategy, optimizer_strategy, tokens=10)
    assert of_optimizer.tolist() == [(2 + 2) * quarter + 4 * 12.0 / 4 * 10] * 4
    away = ONE_NODE.memory_bytes(other, optimizer_strategy, tokens=10)
    activations = 2 * 12.0 * 10
    # Ranks 0 and 1 are the first stage, which keeps two micro-batches.
    held = 2 * half + 3 * quarter
    assert away.tolist() == [held + 2 * activations] * 2 + [held + activations] * 2
    # Messages of more than a round's bytes take as much as they may.
    cost = replace(ONE_NODE, max_message_bytes=64)
    assert (
        cost.switch_memory_bytes(optimizer_strategy, other, optimizer_strategy).tolist()
        == [quarter + half + 3 * quarter + 64] * 4
    )
    assert (
        cost.switch_memory_bytes(other, optimizer_strategy, optimizer_strategy).tolist()
        == [2 * half + quarter + 3 * quarter + 64] * 4
    )
    messages = ONE_NODE.switch_memory_bytes(optimizer_strategy, other, optimizer_strategy) - (half + 4 * quarter)
    assert messages.min() > 0 and messages.sum() % 2 == 0  # what is sent and what is received lie in them
    most = held + 2 * activations
    assert ONE_NODE.fits(other, optimizer_strategy, 10, most) and not ONE_NODE.fits(
        other, optimizer_strategy, 10, most - 1
    )
    switch = 2 * half + 4 * quarter + 64
    for limit, back_fits in ((switch, True), (switch - 1, False)):
        assert cost.switches_fit([optimizer_strategy, other], 0, limit).tolist()[1][0] is back_fits


def test_costs_of_another_kind_are_refused():
    model = {"layers": LAYERS, "tensors": TENSORS, "nodes": (0,) * 4, "links": LINKS}
    for make, message in (
        (lambda: LayerCostTable(("block", "head"), LAYERS.costs, 1.0), r"\['head'\] have no costs"),
        (lambda: LayerCost(0.0, -1.0, 0.0, 0.0), "token_s=-1"),
        (lambda: CostModel(**model | {"nodes": ()}), "nodes name no rank"),
        (lambda: CostModel(**model, slowness=(1.0,)), "slowness of 1 ranks is given: there are 4"),
        (lambda: CostModel(**model, slowness=(1.0, 0.0, 1.0, 1.0)), r"slowness\[1\]=0"),
        (lambda: CostModel(**model, optimizer_ratio=-1.0), "optimizer_ratio=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
