"""Records of a pipeline, as TensorBoard shows them."""

from dataclasses import replace

import pytest
from helpers.pipelines import World, rebalancing_of

from zeroresize.pipeline import ProfileRecord
from zeroresize.telemetry import ChangeRecord, TensorBoardTelemetry


def write_run(telemetry):
    """Six layers on two stages, the second of which is three times as slow from step 20 on."""
    world, rebalancing = World([0.01] * 6, [1.0, 1.0], (0, 3, 6)), rebalancing_of(num_steps=10)
    moves = []
    for step in range(10, 70, 10):
        world.speeds[1] = 1.0 if step < 20 else 1.0 / 3.0
        profile = world.profile()
        telemetry(ProfileRecord.of(step, profile, "1f1b", 8))
        forecast = rebalancing.update(profile)
        if forecast is not None:
            seconds = (forecast.step_s, forecast.expected_step_s, 0.5)
            boundaries = (forecast.before, forecast.after)
            record = ChangeRecord("layers", step, "", (), (), *boundaries, *seconds, 3_000_000, True, "")
            telemetry(replace(record, moved_bytes=0, is_made=False))
            telemetry(record)
            world.boundaries = record.after
            moves.append(record)
    return moves


def test_tensorboard_shows_the_records(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    telemetry = TensorBoardTelemetry(tmp_path)
    (move,) = write_run(telemetry)
    telemetry.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"pipeline/bubble_ratio", "pipeline_stages/1_layers", "pipeline_changes/moved_bytes"} <= set(
        events.Tags()["scalars"]
    )
    assert [(one.step, one.value) for one in events.Scalars("pipeline_changes/moved_bytes")] == [
        (move.step, 0.0),
        (move.step, 3e6),
    ]
    assert events.Scalars("pipeline_stages/0_layers")[-1].value == move.after[1]
