"""Seconds of iterations, by laps and by process."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.virtual_training import FakeTime

from vit_examples.harness import step_clock
from vit_examples.harness.step_clock import StepClock


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lap_is_the_mean_of_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a GPU, where work ends at synchronisations only, of which there is one a lap."""
    passed, synchronised = FakeTime(), []
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=passed.clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronised.append(passed.now_s))
    clock = StepClock(torch.device(device))
    laps = []
    clock.start()
    for lap in ([1.0, 2.0, 6.0], [4.0]):
        for seconds in lap:
            passed.sleep(seconds)
            clock.tick()
        laps.append(clock.lap())
    passed.sleep(100.0)  # an evaluation
    clock.start()
    passed.sleep(5.0)
    clock.tick()
    assert [*laps, clock.lap()] == [3.0, 4.0, 5.0]
    assert math.isnan(clock.lap())
    assert clock.seconds == ([1.0, 2.0, 6.0, 4.0, 5.0] if device == "cpu" else [3.0, 3.0, 3.0, 4.0, 5.0])
    assert synchronised == ([] if device == "cpu" else [9.0, 13.0, 118.0])


def test_a_lap_goes_on_with_steps_of_an_earlier_process() -> None:
    clock = StepClock(torch.device("cpu"), since_lap=[1.0, 3.0])
    assert clock.num_since_lap == 2 and clock.since_lap() == [1.0, 3.0]
    assert clock.lap() == 2.0 and clock.num_since_lap == 0 and clock.seconds == []
    assert math.isnan(clock.lap())


def test_the_clock_of_a_resumed_run_has_the_iterations_before_it_and_laps_of_its_own() -> None:
    clock = StepClock(torch.device("cpu"), before=[[8.0, 8.0], [9.0]])
    assert math.isnan(clock.lap())
    clock.start()
    clock.tick()
    assert len(clock.seconds) == 1
    assert clock.by_process == [[8.0, 8.0], [9.0], clock.seconds]
    assert clock.lap() < 1.0
