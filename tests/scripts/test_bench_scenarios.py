"""The table of scripts/bench/scenarios.py, and how it compares two versions."""

import csv
import sys

import pytest

from scripts.bench import scenarios as bench_scenarios


@pytest.fixture
def bench(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_scenarios", "--quick", "--seeds", "1", *map(str, arguments)])
        bench_scenarios.main()
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_table_files_and_comparison_say_the_same(bench, tmp_path):
    chosen = ("--only", "few products", "--modes", "mig", "zero-pri")
    table = bench(*chosen, "--csv", tmp_path / "before.csv")
    with (tmp_path / "before.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["zero-pri", "mig"] * 3
    for row in rows:
        assert int(row["recoveries"]) == 1
        assert f"{float(row['step / off']):.3f}" in table
    assert cells_of(bench(*chosen, "--before", tmp_path / "before.csv")) == cells_of(table)


def cells_of(table):
    return [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if line.startswith("│")]


def test_what_changed_stands_beside_what_it_was(capsys):
    (scenario, mode), *_ = bench_scenarios.sections(True)["few products"]
    figures = scenario.figures(bench_scenarios.BalanceConfig(mode="off"))
    row = bench_scenarios.as_row("few products", scenario, mode, figures)
    before = {name: str(value) for name, value in row.items()} | {"step / off": "0.875"}
    bench_scenarios.print_table([row], {bench_scenarios.key_of(row): before})
    said = " ".join(capsys.readouterr().out.split())
    assert "1.000 (0.875)" in said and said.count("(0.") == 1


def test_sections_without_a_line_in_the_modes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_scenarios", "--quick", "--only", "calibration", "--modes", "mig"])
    with pytest.raises(SystemExit) as ended:
        bench_scenarios.main()
    assert ended.value.code == 2 and "sections ['calibration'] have no line with" in capsys.readouterr().err


def test_every_line_is_another_one():
    for quick in (True, False):
        lines = [line for own in bench_scenarios.sections(quick).values() for line in set(own)]
        assert len(lines) == sum(len(own) for own in bench_scenarios.sections(quick).values())
