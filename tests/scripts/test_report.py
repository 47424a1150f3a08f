"""Runs beside each other: a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from helpers.runs import record, write_run
from matplotlib import pyplot

from scripts.report import __main__ as report
from scripts.report.runs import Run, runs_at

SLOW = {"kind": "sleep", "chi": {"1": 4.0}}
PRUNES = [record(1, 1, 0.0), record(1, 2, 0.5), record(1, 3, 0.5), record(1, 4, 0.5)]


def summary(step_ms: float) -> dict[str, float]:
    return {"step_ms": step_ms, "mean_step_ms": 1.1 * step_ms, "test_accuracy": 0.756, "ranks": 2}


def speed_ups(path: Path) -> dict[str, str]:
    runs, left_out = runs_at(path)
    assert not left_out
    return {row[0]: row[4] for row in report.rows_of(runs)}


def test_runs_are_compared_with_mode_off_of_the_same_stragglers(tmp_path: Path) -> None:
    seconds = [0.2] * 40
    write_run(tmp_path / "homogeneous", "off", seconds, summary=summary(200))
    write_run(tmp_path / "baseline", "off", seconds, summary=summary(800), straggler=SLOW)
    write_run(tmp_path / "zero", "zero-pri", seconds, PRUNES, summary=summary(250), straggler=SLOW)
    runs, _ = runs_at(tmp_path)
    assert report.rows_of(runs) == [
        ["baseline", "40", "800.0", "880.0", "1.00×", "75.6 %", "0.00", "0.00", "0.00"],
        ["homogeneous", "40", "200.0", "220.0", "1.00×", "75.6 %", "0.00", "0.00", "0.00"],
        ["zero", "40", "250.0", "275.0", "3.20×", "75.6 %", "0.00", "0.00", "0.25"],
    ]


def test_each_seed_is_compared_with_its_own_reference(tmp_path: Path) -> None:
    for seed, step_ms in ((0, 400), (1, 800)):
        training = {"seed": seed}
        write_run(tmp_path / f"off/seed{seed}", "off", [0.2] * 40, summary=summary(step_ms), training=training)
        write_run(tmp_path / f"mig/seed{seed}", "mig", [0.2] * 40, summary=summary(200), training=training)
    larger = {"seed": 0, "batch_size": 64}
    write_run(tmp_path / "of other settings", "mig", [0.2] * 40, summary=summary(200), training=larger)
    assert speed_ups(tmp_path) == {
        "off/seed0": "1.00×",
        "off/seed1": "1.00×",
        "mig/seed0": "2.00×",
        "mig/seed1": "4.00×",
        "of other settings": "–",
    }


def test_a_summary_of_before_a_run_was_resumed_does_not_count(tmp_path: Path) -> None:
    old = {**summary(100), "steps": 20}
    run = Run.read(write_run(tmp_path / "resumed", "zero-pri", [0.2] * 40, PRUNES, summary=old), "resumed")
    assert report.rows_of([run]) == [["resumed", "40, not ended", "200.0", "200.0", "–", "–", "0.00", "0.00", "0.25"]]


def test_what_moved_and_what_is_dropped_of_the_rest_are_parts_of_an_even_share(tmp_path: Path) -> None:
    away = [record(1, 1, 0.0), *(record(1, update, 0.5, owned=0.5) for update in range(2, 5))]
    run = Run.read(write_run(tmp_path, "semi", [0.2] * 40, away), "semi")
    assert run.most_relieved() == 1
    assert run.parts() == pytest.approx({"moved": 0.25, "lent": 0.0, "dropped": 0.125})


def test_the_picture_has_a_line_for_each_run(tmp_path: Path) -> None:
    write_run(tmp_path / "baseline", "off", [0.4] * 40, straggler=SLOW)
    write_run(tmp_path / "zero", "zero-pri", [0.4] * 20 + [0.2] * 20, PRUNES, straggler=SLOW)
    figure = report.picture_of(runs_at(tmp_path)[0])
    times, parts = figure.axes
    assert [line.get_label() for line in times.lines] == ["baseline", "zero"]
    assert times.lines[1].get_ydata()[-1] == pytest.approx(200.0)
    assert list(parts.lines[1].get_xdata()) == [0, 20, 30, 40, 40]
    assert list(parts.lines[1].get_ydata()) == [0.0, 0.5, 0.5, 0.5, 0.5]
    pyplot.close(figure)


def test_the_command_tells_a_table_and_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "zero", "zero-pri", [0.2] * 40, PRUNES, summary=summary(200))
    for name, file, text in (
        ("a", "balance-rank0.jsonl", '{"loss": 1}\n'),
        ("b", "metrics.jsonl", "nonsense\n"),
        ("c", "summary.json", "{"),
        ("d", "config.json", "[]"),
    ):
        write_run(tmp_path / name, "off", [0.2] * 40)
        (tmp_path / name / file).write_text(text)
    report.main([str(tmp_path)])
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("| run | steps |") and "| zero | 40 | 200.0 |" in said.out
    assert [line.split(f"{tmp_path}/")[1][0] for line in said.err.splitlines()] == list("abcd")
    assert (tmp_path / "report.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no run there can be read"):
        report.main([str(tmp_path / "a")])
