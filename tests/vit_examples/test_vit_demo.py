"""The demo's runs, each in a folder of its own; what compares them has tests of its own (test_run_report.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from vit_examples import demo
from vit_examples.demo import RUNS, main
from vit_examples.harness.folders import claimed
from zeroresize.status import Status


def test_a_configuration_that_is_wrong_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main([f"--output={tmp_path}", "--set=training.epochs=0"]) == 2
    assert "error: training.epochs=0" in capsys.readouterr().out


@pytest.mark.parametrize("holder", ["demo", "run"])
def test_a_demo_whose_folder_is_in_use_is_refused_and_deletes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    def train(config: str, overrides: Any, folder: Path) -> Iterator[tuple[int, int | None, str]]:
        assert list(folder.iterdir()) == []
        with pytest.raises(ValueError, match="another run is writing there"), claimed(folder.parent):
            pass
        status = Status("units", "ended", 40, 0.0, 0.2, 0.2, 0.2, 0.0, 0.0, ())
        (folder / "status.jsonl").write_text(json.dumps(status.to_dict()) + "\n")
        (folder / "summary.json").write_text('{"test_accuracy": 0.756}')
        yield 1, 1, "done"

    monkeypatch.setattr(demo, "train", train)  # runs end as soon as they begin
    for name in RUNS:
        (tmp_path / name.lower()).mkdir()
        (tmp_path / name.lower() / "metrics.jsonl").touch()
    with claimed(tmp_path / "semi" if holder == "run" else tmp_path):
        assert main([f"--output={tmp_path}", "--set=training.epochs=1"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "error: " in line]
    assert "another run is writing there" in line
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == len(RUNS)
    assert main([f"--output={tmp_path}", "--set=training.epochs=1"]) == 0  # in emptied folders
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert [row[0] for row in rows if row[1:4] == ["40", "200", "ms"] and row[-2:] == ["75.6", "%"]] == list(
        map(str.lower, RUNS)
    )
    assert "Step time of each run" in (tmp_path / "report.html").read_text()


def test_ctrl_c_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main([f"--output={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted: the same command begins anew\n"
