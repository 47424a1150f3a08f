"""Damaged files of a run: the report names them, and does not fall over them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from helpers.runs import record, write_records, write_run

from scripts.report import __main__ as report
from scripts.report.__main__ import write_report
from scripts.report.run import RunFolder

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


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["truncated", "empty", "changed inside", "of objects", "of text"])
def test_columns_that_cannot_be_read_are_left_out(folder: Path, how: str) -> None:
    damaged_columns(folder / "columns-rank1.npz", how)
    page = write_report(RunFolder.read(folder), folder / "report").read_text()
    assert "Left out: columns-rank1.npz is damaged" in page
    assert "<h3>Ranks</h3>" in page


@pytest.mark.few(3)
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
        {**record(1, 5, 0.5).to_dict(), "busy_s": {}},
        {**record(1, 5, 0.5).to_dict(), "gemm_s": []},
        {**record(1, 5, 0.5).to_dict(), "predicted_step_s": ""},
        {**record(1, 5, 0.5).to_dict(), "lent_to": [0.5]},
        {**record(1, 5, 0.5).to_dict(), "layer_shares": {"fc1": None}},
        {**record(1, 5, 0.5).to_dict(), "units": {"heads": "six"}},
        {**record(1, 5, 0.5).to_dict(), "owned": None},
        {**record(1, 5, 0.5).to_dict(), "moved_bytes": "many"},
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
        {"kind": "step", "step": 3, "step_s": {}},
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 10**13}, "step is 10000000000000, expected 41 to 10000000: steps rise"),
        ({"step": -1}, "step is -1, expected 41 to 10000000: steps rise"),
        ({"step": 40}, "step is 40, expected 41 to 10000000: steps rise"),
        ({"lent_to": {"all": 0.5}}, r"expected ranks in lent_to, found \['all'\]"),
    ],
)
def test_a_record_of_no_possible_step_or_rank_is_named(folder: Path, changes: dict, said: str) -> None:
    file = folder / "balance-rank1.jsonl"
    with file.open("a") as stream:
        stream.write(json.dumps({**record(1, 5, 0.5).to_dict(), **changes}) + "\n")
    with pytest.raises(ValueError, match=f"{file}, line 5: {said}"):
        RunFolder.read(folder)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "step", "step": 10**13, "step_s": 1.0},
        {"kind": "step", "step": 39, "step_s": 1.0},
        {"kind": "epoch", "step": 30},
        {"kind": "epoch", "step": 40, "seconds": [1.0] * 42},
    ],
)
def test_a_line_of_no_possible_step_is_named(folder: Path, line: dict) -> None:
    file = folder / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"{file}, line 2: step is {line['step']}, expected .*: steps rise"):
        RunFolder.read(folder)


def test_a_file_that_is_called_otherwise_is_no_ranks(folder: Path) -> None:
    for kind, ending in (("balance", "jsonl"), ("columns", "npz")):
        (folder / f"{kind}-rank-old.{ending}").write_text("anything")
        (folder / f"{kind}-rank1-copy.{ending}").write_text("anything")
    run = RunFolder.read(folder)
    assert list(run.records) == [0, 1] and not run.left_out


@pytest.mark.slow
def test_a_run_that_cannot_be_drawn_is_left_out_and_the_others_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with it; where it is the only one it is an error of one line."""
    odd = write_run(folder.parent / "odd", "zero-pri", [0.2] * 40, PRUNES)
    only_copies = folder.parent / "only copies"
    only_copies.mkdir()
    (only_copies / "balance-rank-old.jsonl").write_text("anything")

    def facts(run: RunFolder) -> list[tuple[str, str]]:
        if run.path == odd:
            raise MemoryError("too much")
        return []

    monkeypatch.setattr("scripts.report.page.fact_rows", facts)
    monkeypatch.setattr(sys, "argv", ["report", str(folder.parent)])
    report.main()
    page = (folder.parent / "report/report.html").read_text()
    said = f"{odd}: cannot be drawn: MemoryError: too much"
    assert f"Left out: {said}" in page and f"Left out: {only_copies}: no balance-rank" in page
    assert page.count("<h2") == 1 and '<h2 id="run">' in page
    monkeypatch.setattr(sys, "argv", ["report", str(odd)])
    with pytest.raises(SystemExit, match=f"^error: {said}$"):
        report.main()


def test_a_rank_that_lost_a_record_shifts_none_of_its_later_ones(tmp_path: Path) -> None:
    write_run(tmp_path, "zero-pri", [0.2] * 40, PRUNES)
    busy_s = {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.7}
    (tmp_path / "balance-rank1.jsonl").unlink()
    write_records(tmp_path, 1, [record(1, update, 0.0, busy_s=busy_s[update]) for update in (1, 2, 4)])
    slowest = RunFolder.read(tmp_path).slowest_at_full_work()
    assert slowest[:20].tolist() == [0.4] * 10 + [0.5] * 10 and slowest[30:].tolist() == [0.7] * 10
    assert np.isnan(slowest[20:30]).all()


@pytest.mark.parametrize("name", ["balance-rank0.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("text", ['{"loss": 1}\n', "no JSON\n", "\x00\xff\n"])
def test_the_command_ends_with_one_line(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    with pytest.raises(SystemExit, match=f"^error: {folder / name}, line 1: expected"):
        report.main()
