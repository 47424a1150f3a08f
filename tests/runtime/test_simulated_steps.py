"""Steps of pipelines, against closed forms, against torch's own schedules, and against longest paths."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from zeroresize.runtime.schedules import order_of, orders_of
from zeroresize.runtime.simulated_steps import simulated_step, simulated_steps
from zeroresize.runtime.timeline import step_seconds

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
both = pytest.mark.parametrize("schedule", SCHEDULES)
seconds = st.integers(0, 20).map(float)


class RecordingStage:
    """A stage for torch's schedules that only notes what it is told to do."""

    is_last = False

    def __init__(self, stage_index):
        self.stage_index, self.done = stage_index, []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.done.append((True, microbatch))

    def backward_one_chunk(self, microbatch, **_):
        self.done.append((False, microbatch))

    def __getattr__(self, name):
        assert name.startswith(("get_", "perform_"))
        return lambda *_: []


@both
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 2), (3, 7), (4, 4), (5, 12)])
def test_stages_do_what_torch_makes_them_do_in_that_order(schedule, num_stages, num_microbatches):
    for index in range(num_stages):
        stage = RecordingStage(index)
        inputs = [()] * num_microbatches, [{}] * num_microbatches
        runner = SimpleNamespace(
            _stage=stage,
            _n_microbatches=num_microbatches,
            _num_stages=num_stages,
            _check_inputs=lambda *_, inputs=inputs: inputs,
            _initialize_stage=lambda *_: None,
            _maybe_compute_loss=lambda *_: None,
            _maybe_get_loss=lambda *_: None,
            _update_losses=lambda *_: None,
            scale_grads=False,
        )
        SCHEDULES[schedule]._step_microbatches(runner)
        assert order_of(schedule, index, num_stages, num_microbatches) == stage.done


@both
@given(st.integers(1, 8), st.integers(0, 20), seconds, seconds)
def test_equal_stages_have_the_known_bubble_ratio(schedule, num_stages, more, forward_s, backward_s):
    """(P − 1) / (M + P − 1) (GPipe, section 2; the same for 1F1B)."""
    num_microbatches = num_stages + more
    step = simulated_step([forward_s] * num_stages, [backward_s] * num_stages, num_microbatches, schedule=schedule)
    assert step.step_s == (num_microbatches + num_stages - 1) * (forward_s + backward_s)
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1) if step.step_s else 0.0
    assert step.bubble_ratio == pytest.approx(expected)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6), st.integers(1, 8))
def test_gpipe_is_two_flow_shops(stages, num_microbatches):
    """Stages and wires are machines through which equal jobs pass in order: Σ p + (M − 1) max p, there and back."""
    forward_s, backward_s, wires_s = (list(column) for column in zip(*stages, strict=True))
    wires_s = wires_s[1:]
    step = simulated_step(forward_s, backward_s, num_microbatches, schedule="gpipe", communication_s=wires_s)
    there, back = ([*own, *wires_s] for own in (forward_s, backward_s))
    assert step.step_s == sum(there + back) + (num_microbatches - 1) * (max(there) + max(back))
    assert step.idle_s == tuple(
        step.step_s - num_microbatches * (forward + backward)
        for forward, backward in zip(forward_s, backward_s, strict=True)
    )


def longest_path_s(orders, forward_s, backward_s):
    """The critical path through the operations of all stages, each after its stage's last and its neighbour's."""
    num_stages = len(orders)
    ends = {(stage, *one): 0.0 for stage in range(num_stages) for one in orders[stage]}
    before = {}
    for stage, order in enumerate(orders):
        for previous, operation in itertools.pairwise([None, *order]):
            needed = [(stage, *previous)] if previous else []
            neighbour = stage - 1 if operation[0] else stage + 1
            needed += [(neighbour, *operation)] if 0 <= neighbour < num_stages else []
            before[(stage, *operation)] = needed
    for _ in ends:  # Bellman and Ford
        relaxed = {
            key: max((ends[one] for one in before[key]), default=0.0) + (forward_s if key[1] else backward_s)[key[0]]
            for key in ends
        }
        if relaxed == ends:
            break
        ends = relaxed
    return max(ends.values())


@both
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5), st.integers(0, 5))
def test_uneven_stages_take_the_longest_path(schedule, stages, more):
    forward_s, backward_s = (list(column) for column in zip(*stages, strict=True))
    num_stages, num_microbatches = len(stages), len(stages) + more
    orders = [order_of(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    step = simulated_step(forward_s, backward_s, num_microbatches, schedule=schedule)
    assert step.step_s == longest_path_s(orders, forward_s, backward_s)


@both
@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=5), st.integers(0, 5), seconds, seconds)
def test_a_step_is_never_shorter_than_its_slowest_stage_nor_for_slower_wires(schedule, stages, more, less_s, more_s):
    forward_s, backward_s = (list(column) for column in zip(*stages, strict=True))
    num_microbatches = len(stages) + more
    fast, slow = (
        simulated_step(forward_s, backward_s, num_microbatches, schedule=schedule, communication_s=wire_s)
        for wire_s in sorted((less_s, more_s))
    )
    assert fast.step_s <= slow.step_s
    assert fast.step_s >= num_microbatches * max(map(sum, stages))
    assert 0.0 <= fast.bubble_ratio <= 1.0


def test_1f1b_waits_for_its_messages_by_hand():
    """Two stages, two micro-batches, forward 1, backward 2, wire 1: torch fuses sends with the receives after them.

    Stage 0: F0 0-1, sent 1-2; F1 1-2, sent 2-3. Stage 1: F0 2-3, B0 3-5, sent until 6, F1 6-7, B1 7-9, sent 9-10.
    Stage 0: B0 6-8, B1 10-12.
    """
    step = simulated_step([1.0, 1.0], [2.0, 2.0], 2, communication_s=1.0)
    assert step.step_s == 12.0
    assert step.idle_s == (6.0, 6.0)


@both
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 8))
def test_steps_take_as_long_as_operations_one_by_one_also_with_few_micro_batches(schedule, stages, num_microbatches):
    forward_s, backward_s = (list(column) for column in zip(*stages, strict=True))
    of_each = (np.broadcast_to(one, (num_microbatches, len(stages))) for one in (forward_s, backward_s))
    expected = step_seconds(orders_of(schedule, len(stages), num_microbatches), *of_each)
    assert simulated_step(forward_s, backward_s, num_microbatches, schedule=schedule).step_s == expected


def test_what_is_no_pipeline_is_an_error():
    for wrong, message in [
        (([1.0], [1.0, 1.0], 2), "do not belong to one pipeline"),
        (([], [], 2), "do not belong to one pipeline"),
        (([1.0, -1.0], [1.0, 1.0], 2), "finite and not negative"),
        (([1.0, math.nan], [1.0, 1.0], 2), "finite and not negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulated_step(*wrong)
    with pytest.raises(ValueError, match="0 micro-batches are too few"):
        simulated_step([1.0], [1.0], 0, schedule="gpipe")
    with pytest.raises(ValueError, match="schedule='chimera'"):
        simulated_step([1.0], [1.0], 1, schedule="chimera")
    with pytest.raises(ValueError, match="do not belong"):
        simulated_step([1.0, 1.0], [1.0, 1.0], 2, communication_s=[1.0, 1.0])


@both
@given(
    st.integers(1, 5).flatmap(
        lambda num_stages: st.tuples(
            *(
                st.lists(st.lists(seconds, min_size=width, max_size=width), min_size=3, max_size=3)
                for width in (num_stages, num_stages, num_stages - 1)
            )
        )
    ),
    st.integers(5, 9),
)
def test_many_steps_at_once_are_those_of_one_after_the_other(schedule, times, num_microbatches):
    together = simulated_steps(*times[:2], num_microbatches, schedule=schedule, communication_s=times[2])
    assert together.tolist() == [
        simulated_step(*of_stages, num_microbatches, schedule=schedule, communication_s=wires).step_s
        for *of_stages, wires in zip(*times, strict=True)
    ]
