"""What every program writes and shows of a run, whatever is trained."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from vit_examples.harness.run_record import RunRecord
from zeroresize.utils.json_lines import read_json_lines


def record_in(folder: Path, *, num_done: int = 0, is_terminal: bool = False, **options: Any) -> tuple[RunRecord, Any]:
    """A record of a run of 8 steps, and the stream that shows it."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=80, color_system=None)
    options = {"is_shown": True, "files": {"metrics": ("step", num_done), "moves": ("step", num_done)}, **options}
    return RunRecord(
        {"seed": 3}, "a title", folder=folder, num_steps=8, num_done=num_done, console=console, **options
    ), stream


def test_a_log_file_has_the_title_and_a_line_for_each_report(tmp_path: Path) -> None:
    record, stream = record_in(tmp_path)
    with record:
        record.step()
        record.tell(1, "loss 2.0", ", layers 3 3")
        record.row(("1", "2.0"), "epoch 1: loss 2.0")
    assert stream.getvalue() == "a title\nstep 1: loss 2.0, layers 3 3\nepoch 1: loss 2.0\n"


def test_a_terminal_has_a_bar_that_begins_with_the_steps_of_before(tmp_path: Path) -> None:
    record, stream = record_in(tmp_path, num_done=5, is_terminal=True)
    with record:
        record.step()
        record.tell(6, "loss 2.0", ", layers 3 3")
    assert "a title: loss 2.0" in stream.getvalue() and "6/8" in stream.getvalue()
    assert "layers" not in stream.getvalue() and "step 6" not in stream.getvalue()


def test_rows_stand_in_a_table_above_the_bar(tmp_path: Path) -> None:
    record, stream = record_in(tmp_path, is_terminal=True, headings=("epoch", "loss"))
    with record:
        record.step("epoch 1")
        record.row(("1", "2.0"), "epoch 1: loss 2.0")
    last = stream.getvalue().rpartition("a title")[2]
    assert last.index("│     1 │  2.0 │") < last.index("epoch 1 ") and "epoch 1: loss" not in stream.getvalue()


def test_nothing_is_shown_that_is_not_asked_for(tmp_path: Path) -> None:
    for is_terminal in (False, True):
        record, stream = record_in(tmp_path, is_terminal=is_terminal, is_shown=False)
        with record:
            record.step()
            record.tell(1, "loss 2.0")
            record.row((), "epoch 1")
            record.close({}, Table(title="summary"))
        assert stream.getvalue() == ""


def test_lines_stay_up_to_the_step_that_a_run_goes_on_from(tmp_path: Path) -> None:
    first, _ = record_in(tmp_path)
    with first:
        for step in (1, 2, 3):
            first.write("metrics", {"step": step, "loss": 1.0})
            first.write("moves", {"step": step})
    second, _ = record_in(tmp_path, num_done=2)
    with second:
        second.write("metrics", {"step": 3, "loss": math.nan})
    assert read_json_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": None},
    ]
    assert [line["step"] for line in read_json_lines(tmp_path / "moves.jsonl")] == [1, 2]
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 3, "total_steps": 8}
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_has_what_is_plotted(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record, _ = record_in(tmp_path, first_event=0)
    with record:
        record.plot({"loss": 2.0, "balance/ratio": 0.5, "lr": math.nan}, "train/", 3)
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["balance/ratio", "train/loss"]
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(3, 2.0)]


@pytest.mark.parametrize(("num_done", "stays"), [(0, False), (7, False), (8, True)])
def test_the_summary_of_before_stays_where_nothing_is_left_to_train(tmp_path: Path, num_done: int, stays: bool) -> None:
    (tmp_path / "summary.json").write_text("{}")
    record_in(tmp_path, num_done=num_done)
    assert (tmp_path / "summary.json").exists() == stays


def test_a_summary_has_the_versions_and_the_configuration_and_its_table_is_shown(tmp_path: Path) -> None:
    record, stream = record_in(tmp_path)
    with record:
        record.close({"steps": 8, "loss": math.nan}, Table("steps", title="the end"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("versions").keys() >= {"python", "torch", "zeroresize"}
    assert summary == {"steps": 8, "loss": None, "config": {"seed": 3}}
    assert "the end" in stream.getvalue()
