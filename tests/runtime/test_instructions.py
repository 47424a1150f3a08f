"""Plans of a pipeline's step: orders, messages, proofs and simulations."""

import math

import numpy as np
import pytest
from helpers.instruction_events import step_by_events
from helpers.naive_messages import naive_instructions
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.runtime.instructions import (
    DeadlockError,
    Instruction,
    Kind,
    PlanError,
    check,
    instructions_of,
    planned_instructions,
)
from zeroresize.runtime.schedules import Operation, adaptive_orders, order_of, orders_of, peak_bytes
from zeroresize.runtime.simulated_steps import timeline


@st.composite
def steps(draw):
    """Orders of a step with seconds and bytes [M, S], and limits [S]."""
    num_stages, num_microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = num_microbatches, num_stages
    forward_s, backward_s, num_bytes = random.lognormal(0.0, 1.0, (3, *shape))
    limits = num_bytes.max(axis=0) * random.uniform(1.0, 4.0, num_stages)
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "adaptive"]))
    if schedule == "adaptive":
        orders = adaptive_orders(num_bytes, limits, draw(st.sampled_from([None, 1, num_stages])))
    else:
        orders = orders_of(schedule, *shape[::-1])
    return schedule, orders, forward_s, backward_s, num_bytes, limits


@given(steps())
def test_adaptive_orders_keep_within_memory(step):
    schedule, orders, _, _, num_bytes, limits = step
    if schedule == "adaptive":
        assert (peak_bytes(orders, num_bytes) <= limits * (1.0 + 1e-9)).all()


@given(steps())
def test_planned_messages_are_free_of_deadlock_whatever_operations_take(step):
    _, orders, forward_s, backward_s, *_ = step
    stages = planned_instructions(orders, forward_s, backward_s)
    check(stages, len(forward_s))
    for stage, order in zip(stages, orders, strict=True):
        computed = [Operation(kind is Kind.FORWARD, number) for kind, number in stage if kind.computes]
        assert computed == list(order)


@given(steps())
def test_a_planned_step_takes_what_the_timeline_says(step):
    _, orders, forward_s, backward_s, *_ = step
    ends = timeline(orders, forward_s, backward_s)
    step_s = step_by_events(planned_instructions(orders, forward_s, backward_s), forward_s, backward_s)
    assert step_s == pytest.approx(ends.step_s)
    assert list(ends.ends_s) == sorted(ends.ends_s)
    assert step_s >= (forward_s + backward_s).sum(axis=0).max() - 1e-9


def test_orders_are_those_of_pipedream_flush():
    def words(order):
        return " ".join(("F" if is_forward else "B") + str(number) for is_forward, number in order)

    assert words(order_of("1f1b", 1, 3, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(order_of("1f1b", 0, 4, 2)) == "F0 F1 B0 B1"
    assert words(order_of("gpipe", 2, 3, 2)) == "F0 F1 B0 B1"
    # equal stages, as many under way as stages: the cyclic schedule is 1F1B
    assert adaptive_orders(np.ones((6, 3)), [math.inf] * 3, 3)[2] == order_of("1f1b", 2, 3, 6)


def test_stages_that_send_to_each_other_wait_for_ever_and_the_circle_is_told():
    orders = orders_of("1f1b", 2, 3)
    with pytest.raises(DeadlockError, match="which waits for") as caught:
        check(naive_instructions(orders), 3)
    circle = " ".join(caught.value.circle)
    assert "activation of micro-batch 1 from stage 0 to 1" in circle
    assert "gradient of micro-batch 0 from stage 1 to 0" in circle
    check(naive_instructions(orders_of("gpipe", 2, 3)), 3)
    check(instructions_of("1f1b", 2, 3), 3)


def test_messages_in_another_order_on_the_other_side_are_a_deadlock_where_order_counts():
    stages = [list(stage) for stage in instructions_of("gpipe", 2, 2)]
    receives = [place for place, (kind, _) in enumerate(stages[1]) if kind is Kind.RECV_ACT_START]
    first, second = receives
    stages[1].insert(first, stages[1].pop(second))
    with pytest.raises(DeadlockError):
        check(stages, 2)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_was_spoiled_is_refused(seed):
    random = np.random.default_rng(seed)
    stages = [list(stage) for stage in instructions_of("1f1b", 3, 4)]
    stage = int(random.integers(3))
    place = int(random.integers(len(stages[stage])))
    without = [list(each) for each in stages]
    del without[stage][place]
    twice = [list(each) for each in stages]
    twice[stage].append(twice[stage][place])
    foreign = [list(each) for each in stages]
    foreign[stage].append(Instruction(Kind.FORWARD, 4))
    for spoiled, message in ((without, "is never told"), (twice, "twice"), (foreign, "of 4 micro-batches")):
        with pytest.raises(PlanError, match=message):
            check(spoiled, 4)
    kind, number = stages[stage][place]
    if not kind.computes and not kind.starts:  # a wait before its start
        early = [list(each) for each in stages]
        early[stage].remove(stages[stage][place])
        early[stage].insert(0, Instruction(kind, number))
        with pytest.raises(PlanError, match="before"):
            check(early, 4)


def test_what_is_no_plan_is_named():
    with pytest.raises(PlanError, match="no stage"):
        check([])
    with pytest.raises(ValueError, match="schedule='zb'"):
        order_of("zb", 0, 1, 1)
    with pytest.raises(ValueError, match="0 micro-batches"):
        order_of("1f1b", 0, 1, 0)
    with pytest.raises(ValueError, match="micro-batch 1 keeps 3 bytes of activations on stage 0 and needs 0 more"):
        adaptive_orders([[1.0], [3.0]], [2.0])
    with pytest.raises(ValueError, match="stages wait for each other"):
        timeline([[Operation(False, 0), Operation(True, 0)]], np.ones((1, 1)), np.ones((1, 1)))
