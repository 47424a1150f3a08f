"""A folder of runs on one page, beside each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from helpers.runs import record, write_run

from scripts.report.__main__ import runs_below, write_comparison
from scripts.report.compare import NamedRun, compared_with, comparison_rows
from scripts.report.page import fact_rows
from scripts.report.run import RunFolder

ROOT = Path(__file__).parents[2]
SLOW = {"kind": "sleep", "chi": {"1": 4.0}}
PRUNES = [record(1, 1, 0.0), record(1, 2, 0.5), record(1, 3, 0.5), record(1, 4, 0.5)]


def summary(step_ms: float) -> dict[str, float]:
    return {"step_ms": step_ms, "mean_step_ms": 1.1 * step_ms, "test_accuracy": 0.756, "ranks": 2}


def speed_ups(path: Path) -> dict[str, str]:
    runs, left_out = runs_below(path)
    assert not left_out
    return {row[0]: row[4] for row in comparison_rows(runs)}


def test_runs_are_compared_with_the_one_called_baseline(tmp_path: Path) -> None:
    seconds = [0.2] * 40
    write_run(tmp_path / "homogeneous", "off", seconds, summary=summary(200))
    write_run(tmp_path / "baseline", "off", seconds, summary=summary(800), straggler=SLOW)
    write_run(tmp_path / "zero", "zero-pri", seconds, PRUNES, summary=summary(250), straggler=SLOW)
    runs, _ = runs_below(tmp_path)
    assert comparison_rows(runs) == [
        ["baseline", "40", "800.0", "880.0", "1.00×", "75.6 %", "0.00", "0.00", "0.00"],
        ["homogeneous", "40", "200.0", "220.0", "4.00×", "75.6 %", "0.00", "0.00", "0.00"],
        ["zero", "40", "250.0", "275.0", "3.20×", "75.6 %", "0.00", "0.00", "0.25"],
    ]
    assert compared_with(runs).startswith("Speed-up: the median step of baseline over the run's.")


def test_without_one_they_are_compared_with_mode_off_of_the_same_stragglers(tmp_path: Path) -> None:
    slower, seconds = {"kind": "sleep", "chi": {"1": 8.0}}, [0.2] * 40
    for name, step_ms, straggler in (("off 4", 400, SLOW), ("off 8", 800, slower)):
        write_run(tmp_path / name, "off", seconds, summary=summary(step_ms), straggler=straggler)
        write_run(tmp_path / name.replace("off", "mig"), "mig", seconds, summary=summary(200), straggler=straggler)
    assert speed_ups(tmp_path) == {"off 4": "1.00×", "off 8": "1.00×", "mig 4": "2.00×", "mig 8": "4.00×"}


def test_a_summary_of_before_a_run_was_resumed_does_not_count(tmp_path: Path) -> None:
    old = {**summary(100), "steps": 20}
    run = RunFolder.read(write_run(tmp_path / "resumed", "zero-pri", [0.2] * 40, PRUNES, summary=old))
    assert dict(fact_rows(run))["state"] == "the run has not ended" and not run.summary
    assert comparison_rows([NamedRun("resumed", run)]) == [
        ["resumed", "40, not ended", "200.0", "200.0", "–", "–", "0.00", "0.00", "0.25"]
    ]
    ended = RunFolder.read(write_run(tmp_path / "ended", "zero-pri", [0.2] * 40, PRUNES, summary={**old, "steps": 40}))
    assert "state" not in dict(fact_rows(ended))


def test_whether_a_run_has_ended_is_not_told_by_a_damaged_summary(tmp_path: Path) -> None:
    write_run(tmp_path, "zero-pri", [0.2] * 40, PRUNES)
    (tmp_path / "summary.json").write_text("{")
    run = RunFolder.read(tmp_path)
    assert run.left_out[0].startswith("summary.json is damaged") and "state" not in dict(fact_rows(run))
    assert comparison_rows([NamedRun("damaged", run)])[0][1] == "40"


def test_runs_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "baseline", "off", [0.2] * 40, summary=summary(800), training={"batch_size": 64, "seed": 0})
    write_run(tmp_path / "same", "mig", [0.2] * 40, summary=summary(400), training={"batch_size": 64, "seed": 1})
    write_run(tmp_path / "other", "mig", [0.2] * 40, summary=summary(400), training={"batch_size": 8, "seed": 0})
    assert speed_ups(tmp_path) == {"baseline": "1.00×", "other": "–", "same": "2.00×"}


def test_each_seed_is_compared_with_its_own_reference(tmp_path: Path) -> None:
    for seed, step_ms in ((0, 400), (1, 800)):
        training = {"seed": seed}
        write_run(tmp_path / f"Baseline/seed{seed}", "off", [0.2] * 40, summary=summary(step_ms), training=training)
        write_run(tmp_path / f"MIG/seed{seed}", "mig", [0.2] * 40, summary=summary(200), training=training)
    assert speed_ups(tmp_path) == {
        "Baseline/seed0": "1.00×",
        "Baseline/seed1": "1.00×",
        "MIG/seed0": "2.00×",
        "MIG/seed1": "4.00×",
    }


def test_the_page_has_the_table_first_and_a_section_of_every_run(tmp_path: Path) -> None:
    write_run(tmp_path / "baseline", "off", [0.4] * 40, summary=summary(400))
    write_run(tmp_path / "zero/seed 0", "zero-pri", [0.4] * 20 + [0.2] * 20, PRUNES)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/balance-rank0.jsonl").write_text('{"loss": 1}\n')
    runs, left_out = runs_below(tmp_path)
    page = write_comparison(tmp_path, runs, left_out, tmp_path / "report").read_text()
    headings = re.findall(r'<h2 id="([^"]*)">', page)
    assert headings == ["baseline", "zero/seed 0"]
    assert page.index("speed-up") < page.index("<h2")
    assert re.findall(r'<a href="#([^"]*)">', page) == ["baseline", "zero/seed%200"]
    assert "Left out: " in page and "broken/balance-rank0.jsonl, line 1" in page
    assert "40, not ended" in page and "Left out: " in page
    assert (tmp_path / "report/zero/seed 0/times.png").is_file()


@pytest.mark.slow
def test_the_command_makes_one_page_of_a_folder_of_runs(tmp_path: Path) -> None:
    for name in ("baseline", "mig"):
        write_run(tmp_path / name, "off" if name == "baseline" else name, [0.2] * 40, summary=summary(200))
    for _ in range(2):  # again, over what it left
        command = [sys.executable, "-m", "scripts.report", str(tmp_path)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, f"written to {tmp_path}/report/report.html\n"), result.stderr
    assert len(list(tmp_path.rglob("report.html"))) == 1
