"""Damaged files of a run: the report names them, and does not fall over them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from made_up_runs import record, write_run

from scripts import report
from scripts.report import write_report
from scripts.report_run import RunFolder

PRUNES = [record(1, 1, 0.0), record(1, 2, 0.5), record(1, 3, 0.5), record(1, 4, 0.5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", "zero-pri", [0.2] * 40, PRUNES, summary={"step_ms": 200.0})


def damaged_columns(path: Path, how: str) -> None:
    np.savez_compressed(path, fc1=np.arange(1000))
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "changed inside":
        middle = len(whole) // 2
        path.write_bytes(
            whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 40]) + whole[middle + 40 :]
        )
    elif how == "of objects":
        np.savez_compressed(path, fc1=np.array([{}], dtype=object))
    else:
        np.savez_compressed(path, fc1=np.array([["text"]]))


@pytest.mark.parametrize("how", ["truncated", "empty", "changed inside", "of objects", "of text"])
def test_columns_that_cannot_be_read_are_left_out(folder: Path, how: str) -> None:
    damaged_columns(folder / "columns-rank1.npz", how)
    page = write_report(RunFolder.read(folder), folder / "report").read_text()
    assert "Left out: columns-rank1.npz is damaged" in page
    assert "<h3>Ranks</h3>" in page


@pytest.mark.parametrize(
    "text", ['{"step_ms": 2', "[1, 2]", "", '{"config": 3, "step_ms": "fast", "test_accuracy": []}']
)
@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_summary_that_cannot_be_read_is_left_out(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    page = write_report(RunFolder.read(folder), folder / "report").read_text()
    assert (f"Left out: {name} is damaged" in page) == (not text.startswith('{"config"'))
    assert "200" in page  # the step, from metrics.jsonl where need be


@pytest.mark.parametrize(
    "line",
    [
        {"loss": 1.0},
        {**record(1, 5, 0.5).to_dict(), "step": None},
        {**record(1, 5, 0.5).to_dict(), "step": 50.5},
        {**record(1, 5, 0.5).to_dict(), "busy_s": "long"},
        {**record(1, 5, 0.5).to_dict(), "lent_to": [0.5]},
        {**record(1, 5, 0.5).to_dict(), "layer_shares": {"fc1": None}},
        {name: value for name, value in record(1, 5, 0.5).to_dict().items() if name != "predicted_step_s"},
    ],
)
def test_a_line_that_is_no_record_is_named(folder: Path, line: dict) -> None:
    file = folder / "balance-rank1.jsonl"
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    with pytest.raises(
        ValueError, match=f"{file}, line 5: expected what zeroresize.UpdateRecord has; missing, or no numbers, are: "
    ):
        RunFolder.read(folder)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 3, "step_s": 1.0},
        {"kind": "step", "step": 3},
        {"kind": "step", "step": "3", "step_s": 1.0},
        {"kind": "epoch", "step": 3, "seconds": ["1"]},
        {"kind": "epoch", "step": 3, "seconds": 4},
        {"kind": "epoch", "step": 3, "from_step": None},
    ],
)
def test_a_line_that_is_neither_a_step_nor_an_epoch_is_named(folder: Path, line: dict) -> None:
    file = folder / "metrics.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"{file}, line 1: expected a step's or an epoch's numbers"):
        RunFolder.read(folder)


@pytest.mark.parametrize("name", ["balance-rank0.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("text", ['{"loss": 1}\n', "no JSON\n", "\x00\xff\n"])
def test_the_command_ends_with_one_line(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    with pytest.raises(SystemExit, match=f"^error: {folder / name}, line 1: expected"):
        report.main()
