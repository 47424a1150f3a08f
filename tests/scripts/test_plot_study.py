"""Pictures of studies: cells' names tell where their points are."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

from scripts.study import zero_figures
from scripts.study.__main__ import read_table
from scripts.study.plot import against_baseline, draw, lines_of, place_of

ROOT = Path(__file__).parents[2]


def test_a_cells_name_tells_line_and_place():
    for cell, x, expected in (
        ("SEMI χ=4", "χ", ("SEMI", 4.0)),
        ("Pri γ=9/10 all, attention last", "γ", ("Pri all, attention last", 0.9)),
        ("Baseline", "χ", ("Baseline", None)),
    ):
        assert place_of(cell, x) == expected


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "study.csv"
    rows = [("homogeneous", 0, 100, 0.5), ("homogeneous", 1, 100, 0.52)]
    rows += [
        (f"{line} χ={chi}", seed, 100 * chi, 0.4 + 0.1 * seed)
        for line in ("A", "B")
        for chi in (4, 2)
        for seed in (0, 1)
    ]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["cell", "seed", "step_ms", "test_accuracy"])
        writer.writerows(rows)
    return path


def test_means_and_spreads_are_drawn_in_order_and_other_cells_across(table):
    figure = draw(read_table(table), "χ")
    times, accuracy = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["median step, ms", "test accuracy, %"]  # it knows no mean
    lines = {container.get_label(): container[0] for container in times.containers}
    assert list(lines) == ["A", "B"]
    assert lines["A"].get_xdata().tolist() == [2, 4] and lines["A"].get_ydata().tolist() == [200, 400]
    (_, _, (bars,)) = accuracy.containers[0]
    low, high = bars.get_segments()[0][:, 1]
    assert (high + low) / 2 == pytest.approx(45) and (high - low) / 2 == pytest.approx(100 * 0.1 / 2**0.5)
    across = [line for line in times.lines if line.get_label() == "homogeneous"]
    assert across[0].get_ydata()[0] == 100
    pyplot.close(figure)


def test_step_times_are_means_where_every_row_tells_them_and_else_medians(tmp_path):
    """Rows of older runs know medians only, and the two are never drawn as one."""
    path = tmp_path / "study.csv"
    rows = ["A χ=2,0,100,110,0.5", "A χ=4,0,200,260,0.5", "B χ=2,0,,,0.5"]
    for more, label, expected in (
        ([], "mean step, ms", [110, 260]),
        (["A χ=8,0,300,,0.5"], "median step, ms", [100, 200, 300]),
    ):
        path.write_text("\n".join(["cell,seed,step_ms,mean_step_ms,test_accuracy", *rows, *more]))
        figure = draw(read_table(path), "χ")
        assert figure.axes[0].get_ylabel() == label
        assert figure.axes[0].containers[0][0].get_ydata().tolist() == expected
        pyplot.close(figure)


def test_accuracy_is_drawn_against_baselines_of_the_same_seed_and_rounding_as_a_band():
    rows = [
        {"cell": cell, "seed": seed, "step_ms": "100", "test_accuracy": accuracy}
        for cell, *accuracies in (("Baseline χ=2", "0.5", "0.6"), ("A χ=2", "0.4", "0.6"))
        for seed, accuracy in zip("01", accuracies, strict=True)
    ]
    rounding = [
        {"cell": "lr", "seed": "0", "test_accuracy": "0.51"},
        {"cell": "lr", "seed": "1", "test_accuracy": "0.57"},
    ]
    figure = draw(against_baseline(rows, rounding), "χ", "points")
    times, accuracy = figure.axes
    assert [container.get_label() for container in times.containers] == ["Baseline", "A"]
    (container,) = accuracy.containers  # of A: Baseline would lie at nought
    assert container[0].get_ydata()[0] == pytest.approx(-5)
    (mean,) = [line.get_ydata()[0] for line in accuracy.lines if line.get_label() == "Baseline, rounding alone"]
    assert mean == pytest.approx(-1)
    pyplot.close(figure)
    with pytest.raises(ValueError, match=r"no Baseline with the seeds \['2'\]"):
        against_baseline(rows, [{**rounding[0], "seed": "2"}])


def test_figures_of_pinned_ratios_tell_the_products_of_the_slowest_rank():
    def rows(*cells):
        return [{"cell": cell, "seed": "0", "test_accuracy": "0.4"} for cell in cells]

    def products(chosen, x):
        return {
            line: {place: float(of_cell[0]["products"]) for place, of_cell in cells if "products" in of_cell[0]}
            for line, cells in lines_of(chosen, x).items()
        }

    table = rows(
        "Baseline", "Pri γ=1/4 all", "Pri γ=1/4 one", "Pri γ=3/4 one", "PriDiff γ=1/2 one", "PriDiff γ=7/8 one"
    )
    assert products(zero_figures.by_ratio(table, "all", 1), "γ") == {"Baseline": {None: 1}, "Pri": {0.25: 0.75}}
    assert products(zero_figures.by_ratio(table, "one", 2), "γ")["Pri"] == {0.25: 1.5, 0.75: 1}
    of_skewness = products(zero_figures.by_skewness(table), "χ")
    assert of_skewness["Baseline"][8] == 8 and of_skewness["Pri"] == {4 / 3: 1, 4: 1}
    assert of_skewness["PriDiffR"] == {2: 1, 8: 1} and of_skewness["PriDiffE"] == {2: 1, 4: 2, 8: 4, 10: 5}


@pytest.mark.slow
def test_the_command_writes_a_picture_or_says_what_is_wrong(table, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "scripts.study.plot", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert run(table).returncode == 0 and table.with_suffix(".png").stat().st_size > 1000
    wrong = run(table, "--x", "λ")
    assert wrong.returncode == 1 and "no cell's name holds 'λ=' and a number" in wrong.stderr
    missing = run(tmp_path / "none.csv")
    assert missing.returncode == 1 and "error:" in missing.stderr


def test_another_table_is_refused_by_the_columns_that_it_lacks(tmp_path):
    (tmp_path / "other.csv").write_text("cell,step_ms\nA χ=2,1.0\n")
    with pytest.raises(
        ValueError, match=r"not a table of scripts.study: the columns \['seed', 'test_accuracy'\] are missing"
    ):
        read_table(tmp_path / "other.csv")
    for place in ("1/0", "1.2.3"):
        with pytest.raises(ValueError, match=re.escape(f"cell 'A χ={place}': χ={place} is no number")):
            place_of(f"A χ={place}", "χ")
