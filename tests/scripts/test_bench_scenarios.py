"""The table of scripts/bench/scenarios.py, and how it compares two versions."""

import csv
import re
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
    assert table.count("products 10 %") == 4 and table.count("products 40 %") == 2
    with (tmp_path / "before.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["zero-pri", "mig"] * 3
    for row in rows:
        assert int(row["recoveries"]) == 1
        assert f"{float(row['step / off']):.3f}" in table
    assert bench(*chosen, "--before", tmp_path / "before.csv") == table


@pytest.mark.slow
def test_what_changed_stands_beside_what_it_was(bench, tmp_path):
    chosen = ("--only", "few products", "--modes", "zero-pri")
    bench(*chosen, "--csv", tmp_path / "before.csv")
    table = bench(*chosen, "--before", tmp_path / "before.csv", "--set", "tolerance=5.0")
    assert "1.000 (0.8" in " ".join(table.split())
    assert re.search(r"0\.000 \(0\.(0[5-9]|1)", " ".join(table.split())), "nothing is dropped any more"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "calibration", "--modes", "mig", "--csv", "x.csv"), "sections ['calibration'] have no line with"),
        (("--set", "tolerance"), "argument --set: 'tolerance': expected KEY=VALUE"),
        (("--set", "tolerance=much"), "argument --set: tolerance="),
        (("--set", "tolerance=["), "argument --set: "),
        (("--set", "tolerant=0.2"), "argument --set: "),
        (
            ("--modes", "semi", "--set", "paper.num_migrating=-1"),
            "argument --set: paper.num_migrating=-1 is not allowed",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said_before(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["bench_scenarios", "--quick", "--seeds", "1", *arguments])
    monkeypatch.setattr(bench_scenarios, "print_table", lambda *_: pytest.fail("something was simulated"))
    with pytest.raises(SystemExit) as ended:
        bench_scenarios.main()
    assert ended.value.code == 2 and f"error: {said}" in capsys.readouterr().err


def test_every_line_is_another_one():
    for quick in (True, False):
        lines = [line for own in bench_scenarios.sections(quick).values() for line in set(own)]
        assert len(lines) == sum(len(own) for own in bench_scenarios.sections(quick).values())
