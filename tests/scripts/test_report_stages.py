"""The report of a pipeline's stages: which had which layers, from the records that balancing tells."""

from dataclasses import replace

import pytest
from helpers.pipelines import World, rebalancing_of

from scripts.report import stages
from zeroresize.pipeline import ProfileRecord
from zeroresize.telemetry import ChangeRecord, JsonLinesTelemetry, TensorBoardTelemetry


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


@pytest.fixture
def run(tmp_path):
    telemetry = JsonLinesTelemetry(tmp_path / stages.FILE)
    moves = write_run(telemetry)
    telemetry.close()
    return tmp_path, moves


def test_the_table_has_a_row_for_each_division_of_the_layers(run, capsys):
    folder, (move,) = run
    stages.main([str(folder)])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    headings, _, before, after = rows
    assert headings[:3] == ["from step", "stage 0", "stage 1"]
    assert move.before == (0, 3, 6) and move.after[1] > 3
    assert before[:3] == ["0", "0 to 2 (3)", "3 to 5 (3)"] and before[-1] == "3.0 MB, 0.50 s"
    count = move.after[1]
    rest = f"{count} to 5 ({6 - count})" if count < 5 else "5 (1)"
    assert after[:3] == [str(move.step), f"0 to {count - 1} ({count})", rest] and after[-1] == ""
    # Medians of before, with two profiles of the slow stage and one even one, and of after.
    assert before[3] == "90 ms" and before[4] == "1.00"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "there is no profile in it yet"),
        (
            ['{"kind": "layers", "is_made": true, "step": 3, "moved_bytes": 1, "change_s": 1.0}'],
            "line 1: expected a profile",
        ),
        (['{"kind": "profile", "step": 3}'], "line 1: expected a profile"),
        (['{"step": 3}'], "line 1: expected a profile"),
        (["nonsense"], "line 1: expected a JSON object"),
    ],
)
def test_other_files_are_named(tmp_path, lines, message):
    path = tmp_path / stages.FILE
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SystemExit) as caught:
        stages.main([str(tmp_path)])
    assert str(path) in str(caught.value) and message in str(caught.value)
    path.unlink()
    with pytest.raises(SystemExit, match=r"pipeline\.jsonl: no such file"):
        stages.main([str(tmp_path)])


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
