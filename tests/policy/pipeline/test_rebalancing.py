"""When layers move, decided on plain numbers."""

import dataclasses
import math

import numpy as np
import pytest
from helpers.pipelines import NUM_MICROBATCHES, World, all_partitions, rebalancing_of
from helpers.states import resumed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import PipelineLoad, PipelineMessages, shortest_partition
from zeroresize.policy.pipeline.rebalancing import described
from zeroresize.runtime.simulated_steps import simulated_step


def test_a_straggling_stage_gets_fewer_layers_and_gets_them_back():
    world, rebalancing = World([1.0] * 12, [1.0, 1.0], (0, 6, 12)), rebalancing_of()
    assert world.train(rebalancing, 3) == []
    world.speeds = [1.0, 0.5]
    assert world.train(rebalancing, 6) == [(0, 8, 12)]
    world.speeds = [1.0, 1.0]
    assert world.train(rebalancing, 6) == [(0, 6, 12)]


def test_two_profiles_must_want_a_move():
    world, rebalancing = World([1.0] * 8, [1.0, 1.0], (0, 4, 8)), rebalancing_of()
    world.train(rebalancing, 2)
    interrupted = dataclasses.replace(world, work=[1.0] * 7 + [9.0])
    assert rebalancing.update(interrupted.profile()) is None and rebalancing.looks_again
    assert rebalancing.update(world.profile()) is None and not rebalancing.looks_again
    assert rebalancing.costs.seconds.tolist() == pytest.approx([1.0] * 8)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.floats(0.1, 10.0), min_size=6, max_size=24),
    st.lists(st.floats(0.2, 1.0), min_size=2, max_size=6),
)
def test_it_settles_and_never_ends_slower_than_it_began(work, speeds):
    world = World(work, [1.0] * len(speeds), Partition.uniform(len(work), len(speeds)).boundaries)
    rebalancing = rebalancing_of()
    world.train(rebalancing, 10)
    world.speeds = speeds
    before = world.step_s
    world.train(rebalancing, 60)
    assert world.train(rebalancing, 10) == []
    assert world.step_s <= before * (1.0 + 1e-9)


def test_what_does_not_pay_stays_until_it_has_cost_as_much():
    world, rebalancing = World([0.01] * 8, [1.0, 1.0], (0, 3, 8), weight_bytes=10**9), rebalancing_of()
    assert world.train(rebalancing, 2) == []
    proposal = rebalancing.propose(world.boundaries)
    num_intervals = math.ceil(proposal.price_s / (100 * proposal.saving_s))
    assert proposal.price_s == pytest.approx(2 * (0.05 + 4.0)) and num_intervals > 3
    # In each interval, the first of which is over, there are two profiles.
    assert world.train(rebalancing, 2 * (num_intervals - 1) - 1) == []
    assert world.train(rebalancing, 1) == [(0, 4, 8)]


def test_a_small_saving_is_noise():
    world = World([1.0] * 99 + [1.5], [1.0, 1.0], (0, 51, 100))
    assert world.train(rebalancing_of(min_saving=0.05), 10) == []
    assert world.train(rebalancing_of(min_saving=0.0), 10) == [(0, 50, 100)]


def test_memory_limits_are_kept():
    # A layer holds 4000 bytes of weights, gradients and state, and 100 of activations for each of two micro-batches.
    world = World([1.0] * 8, [1.0, 0.25], (0, 4, 8))
    rebalancing = rebalancing_of(memory_limits=(5 * 4200.0, 8 * 4200.0))
    world.train(rebalancing, 8)
    assert world.boundaries == (0, 5, 8)
    with pytest.raises(ValueError, match="no partition of 8 layers over 2 stages fits into the memory limits"):
        rebalancing_of(memory_limits=(4200.0, 4200.0)).update(world.profile())


def test_a_stage_over_its_limit_gives_layers_away_whatever_that_takes():
    world = World([1.0] * 8, [1.0, 1.0], (0, 4, 8), weight_bytes=10**9)
    rebalancing = rebalancing_of(memory_limits=(3 * 4.1e9, 8 * 4.1e9), num_steps=1)
    assert world.train(rebalancing, 4) == [(0, 3, 8)]


def test_by_parameters_divides_bytes_where_that_saves_seconds():
    world = World([1.0] * 8, [1.0, 1.0], (0, 6, 8))
    assert world.train(rebalancing_of(by="parameters"), 4) == [(0, 4, 8)]
    world = World([1.0, 1.0, 1.0, 1.0, 4.0, 4.0], [1.0, 1.0], (0, 4, 6))
    assert world.train(rebalancing_of(by="parameters"), 4) == []


def test_what_was_learned_goes_on_elsewhere():
    world, rebalancing = World([1.0] * 8, [1.0, 0.3], (0, 4, 8)), rebalancing_of()
    world.train(rebalancing, 10)
    assert world.boundaries == (0, 7, 8)
    state = resumed(rebalancing.state)
    other = rebalancing_of()
    other.go_on_from(state.on(8, 2))
    assert other.state == rebalancing.state
    world.boundaries = (0, 4, 8)
    assert world.train(other, 4) == [(0, 7, 8)]
    fewer = rebalancing_of()
    fewer.go_on_from(state.on(8, 3))
    assert fewer.costs is None and fewer.state.cost_of_move == rebalancing.state.cost_of_move
    with pytest.raises(ValueError, match="it is of 8 layers, and the pipeline has 9"):
        state.on(9, 2)


def test_moves_are_described():
    moves = [LayerTransfer(7, 2, 1), LayerTransfer(8, 2, 1), LayerTransfer(9, 2, 1)]
    assert described(moves[:1]) == "layer 7 moves from stage 2 to 1"
    assert described(moves) == "layers 7, 8 and 9 move from stage 2 to 1"
    two_ways = [LayerTransfer(3, 1, 0), *moves[:2]]
    assert described(two_ways) == "layer 3 moves from stage 1 to 0, layers 7 and 8 from 2 to 1"


def test_a_move_is_not_bought_shortly_before_work_changes_again():
    """It saves 0.5 s and more a step, takes 20 s and 40 s back, and work changes every 100 steps."""

    def moves(at):
        rebalancing, world = rebalancing_of(MoveCost(1e-8, 0.1), num_steps=2), World([1.0] * 8, [1.0, 1.0], (0, 4, 8))
        world.weight_bytes = 10**9
        for step in (100, 200, 300):
            rebalancing.expect_other_work(step)
            rebalancing.update(world.profile(), step + 1)
        world.work = [1.0] * 4 + [0.2] * 4
        rebalancing.expect_other_work(400)
        return [rebalancing.update(world.profile(), step) is not None for step in (at, at + 2)]

    assert moves(401) == [False, True]
    assert moves(495) == [False, False]


def told_to_and_fro(rebalancing, world, every, num_changes, begin=0):
    """Halves of the work alternate, each told; layers are where they are wanted one step after that is known."""
    moves = []
    for number in range(num_changes):
        half = len(world.work) // 2
        world.work = [1.0 + number % 2] * half + [2.0 - number % 2] * half
        step = begin + number * every
        rebalancing.expect_other_work(step)
        for at in range(2, every):
            if at in (2, 3) or rebalancing.looks_again:
                proposal = rebalancing.update(world.profile(), step + at)
                if proposal is not None:
                    world.boundaries = proposal.after
                    rebalancing.learn(proposal.num_bytes, rebalancing.state.cost_of_move.seconds(proposal.num_bytes))
                    moves.append((number, proposal.after))
    return moves


def test_layers_go_home_from_work_that_changes_to_and_fro_and_stay_there():
    """Every move is right, and over before it has paid its price."""
    world, rebalancing = (
        World([1.0] * 16, [1.0] * 4, (0, 4, 8, 12, 16)),
        rebalancing_of(MoveCost(0.0, 1.0), num_steps=2),
    )
    moves = told_to_and_fro(rebalancing, world, every=6, num_changes=60)
    assert moves and world.boundaries == rebalancing.state.home == (0, 4, 8, 12, 16)
    assert len(moves) <= 12  # of 60
    assert rebalancing.state.rental.doubt > 1.0


THIRDS = (0, 4, 8, 12)


def world_of():
    return World([1.0] * 12, [1.0] * 3, THIRDS)


def messages_of(*seconds, num_layers=12):
    return PipelineMessages(tuple(MoveCost(0.0, one) for one in seconds), (1.0,) * (num_layers + 1))


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
