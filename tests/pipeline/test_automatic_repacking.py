"""A balanced pipeline releases ranks that it no longer needs, on real processes whose layers take known seconds."""

import json

import pytest
from helpers import sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from helpers.sleeping_layers import MICRO, undivided_losses
from helpers.states import values_of

from zeroresize.pipeline import LayerProfiler, Repack

pytestmark = pytest.mark.same_ranks

NUM_LAYERS = 8


class Training(sleeping_layers.Training):
    """It keeps what it is told when it is released."""

    def __init__(self, group, repack, **options):
        self.released = []
        repack = None if repack is None else Repack(**repack, on_release=[self.released.append])
        super().__init__(group, NUM_LAYERS, repack=repack, **{"profile_every": 3} | options)


def layer_bytes_of(training):
    training.train(2)
    with LayerProfiler(training.pipeline, training.optimizer) as profiler:
        training.train(1)
    return max(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes + MICRO * layer.activation_bytes
        for layer in profiler.gather().layers
    )


def whole_curve(by_rank):
    """All losses: those of a stage that was the last one, until it was released, come before those of the next."""
    return [one for losses in reversed(by_rank) for one in losses]


@on_ranks(4)
def test_ranks_are_released_as_soon_as_the_others_have_the_memory(rank, group):
    """Two stages cannot hold all layers with a batch's activations, three can."""

    limit = 3.5 * layer_bytes_of(Training(group, None))
    training = Training(group, {}, memory_limits=[limit] * 4)
    with caught_log_lines() as messages:
        training.train(10)
    cost = values_of(training.balancer.state_dict())["rebalancing"]["cost_of_move"]
    by_rank = gathered(
        group, (training.pipeline.num_stages, training.losses, training.records, training.released, messages, cost)
    )
    assert [one[0] for one in by_rank] == [3] * 4
    losses = whole_curve([one[1] for one in by_rank])
    assert losses == pytest.approx(undivided_losses(NUM_LAYERS, 10), rel=1e-10, abs=0.0)
    assert all(one[2] == by_rank[0][2] for one in by_rank[:3])
    record = by_rank[0][2][0]
    assert (len(record.before), len(record.after), record.step) == (5, 4, 5)  # profiles of steps 2 and 4 agree
    assert record.moved_bytes > 0 and record.expected_step_s > record.step_s
    assert len(by_rank[0][2]) == 1  # no other move, and a re-packing, which makes a process group too, teaches nothing
    assert all(one[5] == by_rank[0][5] for one in by_rank)  # as the links were measured
    assert record.left_out == (3,) and len(record.speeds) == 4 and record.is_made
    released = by_rank[3][3]
    assert [(one.rank, one.released, one.remaining, one.step) for one in released] == [(3, (3,), (0, 1, 2), 5)]
    assert [one[3] for one in by_rank[:3]] == [[]] * 3
    assert any("step 5: 3 of 4 stages go on, ranks [3] are released" in text for text in by_rank[0][4])
    assert not any("released" in text for one in by_rank[1:] for text in one[4])


def test_ranks_are_released_as_work_becomes_less_so_that_steps_take_no_longer(run_ranks):
    def check(rank, group):
        training = Training(group, {"least_stages": 2, "max_slowdown": 1.05})
        training.train(8)
        assert training.pipeline.num_stages == 3 and training.records == []
        training.pace.of_layers = dict.fromkeys(range(NUM_LAYERS), 0.05)
        training.train(12)
        if training.pipeline.is_released:
            return training.losses, training.pipeline.num_stages, None
        state = json.loads(json.dumps(training.balancer.state_dict()))
        values = values_of(state)
        assert len(values["rebalancing"]["costs"]["speeds"]) == 2 and len(values["repacking"]["first_steps_s"]) == 3
        assert training.balancer.what_if().before == training.pipeline.boundaries
        resumed = Training(training.pipeline.process_group, {"max_slowdown": 1.05})
        resumed.balancer.load_state_dict(state)
        assert json.loads(json.dumps(resumed.balancer.state_dict())) == state
        training.pace.keep_time()
        training.pace.of_rank = 60.0 if rank == 1 else 1.0  # a straggler among those that stay
        before = training.pipeline.boundaries
        training.train(8)
        return training.losses, training.pipeline.num_stages, (before, training.pipeline.boundaries)

    by_rank = run_ranks(check, 3)
    assert [num_stages for _, num_stages, _ in by_rank] == [2] * 3
    losses = whole_curve([one for one, *_ in by_rank])
    assert losses == pytest.approx(undivided_losses(NUM_LAYERS, len(losses)), rel=1e-10, abs=0.0)
    before, after = by_rank[0][2]
    assert after[1] > before[1]


@on_ranks(2)
def test_nobody_is_released_too_early(rank, group):
    def first_of(training):
        return values_of(training.balancer.state_dict())["repacking"]["first_steps_s"]

    single = Training(group, {"max_slowdown": 1.05})  # a single profile wants it
    single.train(9)  # three are profiled, and known
    first = first_of(single)
    single.pace.of_layers = dict.fromkeys(range(NUM_LAYERS), 0.05)
    single.train(3)
    single.pace.of_layers = {}
    single.train(4)
    assert first_of(single) == first
    interrupted = Training(group, {"max_slowdown": 1.0})  # three profiles come first, of which the shortest counts
    interrupted.pace.of_rank = 3.0
    interrupted.train(2)
    interrupted.pace.of_rank = 1.0
    interrupted.train(16)
    changing = Training(group, {"max_slowdown": 1.05})  # one profile of each work wants it, and must be confirmed
    changing.train(3)
    for seconds in (0.05, 0.1):
        changing.pace.of_layers = dict.fromkeys(range(NUM_LAYERS), seconds)
        changing.balancer.profile_next()
        changing.train(2)
    assert [training.pipeline.num_stages for training in (single, interrupted, changing)] == [2, 2, 2]


def test_options_must_be_allowed_and_alike(run_ranks):
    for options, message in (
        ({"least_stages": 0}, "least_stages=0 is not allowed"),
        ({"max_slowdown": 0.0}, "max_slowdown=0.0 is not allowed: a finite number above 0 is needed"),
        ({"max_slowdown": "x"}, "max_slowdown='x' is not allowed: a number is needed"),
        ({"max_slowdown": float("nan")}, "max_slowdown=nan is not allowed"),
        ({"on_release": 3}, "on_release=3 is not allowed: a list"),
        ({"on_release": print}, r"a list \(each a function\) is needed"),
        ({"on_release": [print, 3]}, r"a list \(each a function\) is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            Repack(**options)

    def check(rank, group):
        with pytest.raises(ValueError, match="repack needs memory_limits, or a max_slowdown"):
            Training(group, {})
        with pytest.raises(RuntimeError, match="the options of PipelineBalancer"):
            Training(group, {"max_slowdown": 1.0 + rank})
        training = Training(group, {"max_slowdown": 1.0})
        training.train(3)
        before, damaged = (training.balancer.state_dict() for _ in range(2))
        values_of(damaged).update(steps=7, repacking={})
        with pytest.raises(ValueError, match=r"state\.repacking"):
            training.balancer.load_state_dict(damaged)
        assert training.balancer.state_dict() == before

    run_ranks(check, 2)
