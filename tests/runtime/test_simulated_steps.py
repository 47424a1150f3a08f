"""Steps of pipelines, against closed forms and against operations one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.runtime.schedules import orders_of
from zeroresize.runtime.simulated_steps import simulated_step, simulated_steps, step_seconds

both = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
seconds = st.integers(0, 20).map(float)


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
