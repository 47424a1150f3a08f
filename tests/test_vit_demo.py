"""The demo's table and picture, from made-up runs."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from matplotlib import pyplot

from vit_examples.balance_log import mean_in_force
from vit_examples.demo import results_table
from vit_examples.demo_picture import draw


def made_up(step_ms: float, gamma: float) -> dict[str, Any]:
    steps = [{"kind": "step", "step": step, "step_s": step_ms / 1e3} for step in range(3)]
    epoch = {"kind": "epoch", "ratios": [[0.0, gamma]] * 3}
    return {
        "summary": {"step_ms": step_ms, "test_accuracy": 0.75, "steps": 60},
        "lines": [*steps, epoch],
        "updates": [
            {"step": 0, "pruned_share": gamma, "lent_share": gamma / 3},
            {"step": 60, "pruned_share": 0.0, "lent_share": 0.0},  # decided after the last step
        ],
    }


RESULTS = {"homogeneous": made_up(100, 0.0), "Baseline": made_up(2500, 0.0), "SEMI": made_up(1250, 0.9)}


def test_the_table_fits_80_columns_and_explains_itself() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(results_table(RESULTS))
    lines = captured.get().splitlines()
    assert lines[0].strip() == "One slow rank, without and with balancing"
    headings = lines[2]
    for heading in ("run", "step, ms", "speed-up", "÷ homogen.", "dropped", "lent", "accuracy"):
        assert heading in headings
    row = next(line for line in lines if "SEMI" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        "SEMI",
        "1250",
        "2.00×",
        "12.50×",
        "0.90",
        "0.30",
        "75.0%",
    ]
    caption = " ".join(" ".join(lines).split())
    for words in ("nobody slow", "rank 1 slow, nothing done", "computed by the other rank, exactly", "only 60 steps"):
        assert words in caption


def test_only_runs_that_prune_are_drawn_below_and_named() -> None:
    figure = draw(RESULTS, straggler=1)
    times, ratios = figure.axes
    assert [line.get_label() for line in times.lines] == list(RESULTS)
    assert [line.get_label() for line in ratios.lines] == ["SEMI"]
    assert [text.get_text() for text in ratios.get_legend().get_texts()] == ["SEMI"]
    assert ratios.lines[0].get_color() == times.lines[2].get_color()
    pyplot.close(figure)


def test_a_picture_without_pruning_has_no_legend_below() -> None:
    figure = draw({"homogeneous": made_up(100, 0.0)}, straggler=1)
    assert figure.axes[1].get_legend() is None
    pyplot.close(figure)


def test_what_was_dropped_is_told_over_all_steps() -> None:
    records = [{"step": 10, "lent_share": 0.0}, {"step": 20, "lent_share": 0.5}, {"step": 40, "lent_share": 1.0}]
    assert mean_in_force(records, "lent_share", 40) == pytest.approx(0.25)
    assert mean_in_force(records, "lent_share", 50) == pytest.approx(0.4)
    assert mean_in_force([], "lent_share", 50) == 0.0
