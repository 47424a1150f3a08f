"""How long each step took, as metrics.jsonl tells it, and what that says of a run's speed."""

from __future__ import annotations

import math

import pytest

from vit_examples.step_times import TimedSteps, seconds_by_process, timed_steps, timing


def test_steps_belong_to_the_process_that_made_them_and_each_has_the_mean_of_its_line() -> None:
    lines = [
        {"kind": kind, "step": step, "step_s": step_s, "from_step": from_step}
        for kind, step, step_s, from_step in (
            ("step", 1, 2.0, 0),
            ("epoch", 1, 9.0, 0),
            ("step", 2, 4.0, 2),
            ("step", 4, 6.0, 2),
        )
    ]
    steps = timed_steps(lines)
    assert steps == [TimedSteps(0, 2, 2.0, 0), TimedSteps(2, 3, 4.0, 2), TimedSteps(3, 5, 6.0, 2)]
    assert seconds_by_process(steps) == [[2.0, 2.0], [4.0, 6.0, 6.0]]


def test_a_runs_speed_is_that_of_all_settled_steps_and_its_median_that_of_an_undisturbed_one() -> None:
    """Ten steps that warm up, then 90, of which 9 wait for a straggler."""
    seconds = [5.0] * 10 + [1.0] * 9 + [0.1] * 81
    assert timing([seconds], settle_steps=10, batch_size=38, steps_per_epoch=50) == {
        "step_ms": pytest.approx(100),
        "mean_step_ms": pytest.approx(190),
        "images_per_s": pytest.approx(200),
        "epoch_s": pytest.approx(9.5),
    }
    assert timing([[3.0, 1.0]], settle_steps=10, batch_size=1, steps_per_epoch=1)["mean_step_ms"] == 1000
    assert all(map(math.isnan, timing([[]], settle_steps=10, batch_size=1, steps_per_epoch=1).values()))


def test_the_first_steps_of_every_process_are_left_out_of_a_runs_speed() -> None:
    """One that was killed, one that hardly got anywhere, and one that went on; starting takes 9 s and 3 s a step."""
    pieces = [[9.0, 3.0, 0.2, 0.3], [9.0, 0.1], [9.0, 3.0, 0.1, 0.1, 0.2]]
    speed = timing(pieces, settle_steps=2, batch_size=2, steps_per_epoch=10)
    assert speed["mean_step_ms"] == pytest.approx(1e3 * 1.0 / 6)
    assert speed["step_ms"] == pytest.approx(150)
    assert speed["images_per_s"] == pytest.approx(12)
