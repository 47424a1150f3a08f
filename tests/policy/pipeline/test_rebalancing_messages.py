"""What messages take counts when layers are divided."""

import dataclasses

import numpy as np
import pytest
from helpers.pipelines import NUM_MICROBATCHES, World, all_partitions, rebalancing_of

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.message_delays import PipelineMessages
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.repacking_decision import RepackingDecision
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.runtime.simulated_steps import simulated_step

EVEN = (0, 4, 8, 12)


def world_of():
    return World([1.0] * 12, [1.0] * 3, EVEN)


def messages_of(*seconds, num_layers=12):
    return PipelineMessages(tuple(MoveCost(0.0, one) for one in seconds), (1.0,) * (num_layers + 1))


def rule_of(messages, **options):
    return dataclasses.replace(rebalancing_of(**options).rule, messages=messages)


def test_stages_beside_a_slow_link_get_fewer_layers():
    world, slow = world_of(), messages_of(0.0, 4.0 / NUM_MICROBATCHES)
    rebalancing = rebalancing_of()
    moves = []
    for _ in range(6):
        proposal = rebalancing.update(world.profile(), None, slow)
        if proposal is not None:
            world.boundaries = proposal.after
            moves.append(proposal)
    stages = np.diff(world.boundaries)  # 6, 3 and 3 layers, with 4 s of waiting, would be even; the last stages idle
    assert stages[0] >= 6 and stages[1] <= 3 and stages[2] <= 3
    without = rebalancing_of()
    assert world_of().train(without, 6) == []
    assert moves[0].step_s > moves[0].expected_step_s


def test_a_simulated_step_waits_for_messages():
    world, seconds = world_of(), (0.01, 0.03)
    costs = LayerCosts.first(world.profile())
    step = rule_of(messages_of(*seconds)).simulated(costs, Partition(EVEN))
    third = [4.0 / 3.0 / NUM_MICROBATCHES] * 3
    expected = simulated_step(third, [2 * one for one in third], NUM_MICROBATCHES, communication_s=seconds)
    assert step.step_s == pytest.approx(expected.step_s)
    assert step.step_s > rule_of(None).simulated(costs, Partition(EVEN)).step_s


def test_messages_of_another_number_of_stages_do_not_count():
    costs = LayerCosts.first(world_of().profile())
    of_two = costs.on_stages((0, 1), (0, 6, 12))
    with_messages, without = (
        rule_of(messages).simulated(of_two, Partition((0, 6, 12))) for messages in (messages_of(0.5, 0.5), None)
    )
    assert with_messages == without


def test_bytes_of_parameters_are_divided_without_waits():
    world = world_of()
    costs, profile = LayerCosts.first(world.profile()), world.profile()
    rule = rule_of(messages_of(0.5, 0.0), by="parameters")
    assert (rule.load(costs, profile).waits == 0.0).all()
    assert (rule_of(messages_of(0.5, 0.0)).load(costs, profile).waits > 0.0).any()


def test_small_messages_between_certain_layers_attract_boundaries():
    """Boundaries hand on a megabyte, but behind five and nine layers only a kilobyte."""
    sizes = [1e6] * 13
    sizes[5] = sizes[9] = 1e3
    messages = PipelineMessages((MoveCost(1e-7, 0.0), MoveCost(1e-7, 0.0)), tuple(sizes))
    forward, backward = np.full(12, 0.01), np.full(12, 0.02)
    load = PipelineLoad.of(forward + backward, 3)
    best = shortest_partition(load, forward, backward, 8, "1f1b", messages)

    def step_s(partition):
        stages = [np.add.reduceat(seconds, partition.boundaries[:-1]).tolist() for seconds in (forward, backward)]
        return simulated_step(*stages, 8, communication_s=messages.seconds(partition)).step_s

    shortest = min(all_partitions(12, 3), key=step_s)
    assert shortest.boundaries[1:-1] == (5, 9) and best == shortest
    assert shortest_partition(load, forward, backward, 8, "1f1b") != shortest


def test_fewer_stages_are_compared_with_all_of_them_without_messages():
    """Two of four stages would be as fast without messages only; released ranks do not come back."""
    world = World([1.0] * 8, [1.0] * 4, (0, 2, 4, 6, 8))
    slow = messages_of(1.0, 1.0, 1.0, num_layers=8)
    rebalancing = rebalancing_of()
    decision = RepackingDecision(max_slowdown=1.0)
    for _ in range(4):
        profile = world.profile()
        rebalancing.update(profile, None, slow)
        assert decision.update(profile, rebalancing, None) is None
