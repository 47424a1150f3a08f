"""The demo's table and picture, from made-up runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from matplotlib import pyplot

from vit_examples import demo
from vit_examples.balance_log import mean_in_force
from vit_examples.config import TrainingConfig, load_config
from vit_examples.demo import RUNS, main, results_of, results_table, turns
from vit_examples.demo_picture import draw
from vit_examples.harness.run_folder import claimed
from zeroresize.utils.files import JsonLines


def made_up(step_ms: float, gamma: float, halves_ms: tuple[float, ...] = (), moved: float = 0.0) -> dict[str, Any]:
    """A run that relieves rank 1: a share is moved away, and of what is left γ is dropped and γ / 3 lent."""
    steps = [
        {"kind": "step", "step": step, "step_s": (100 if step in (0, 6) else 1) * step_ms / 1e3} for step in range(12)
    ]
    relieved = [[-moved, 1.0 - (1.0 - moved) * (1.0 - gamma)]] * 6
    epochs = [{"kind": "epoch", "step": step, "from_step": step - 5, "ratios": relieved} for step in (5, 11)]
    return {
        "summary": {"step_ms": step_ms, "test_accuracy": 0.75, "steps": 60},
        "lines": [*steps[:6], epochs[0], *steps[6:], epochs[1]],
        "updates": [
            {"step": 0, "owned": 1.0 - moved, "pruned": gamma, "lent": gamma / 3},
            {"step": 60, "owned": 1.0, "pruned": 0.0, "lent": 0.0},  # decided after the last step
        ],
        "halves_ms": list(halves_ms or (step_ms,)),
    }


RESULTS = {
    "homogeneous": made_up(100, 0.0, (95, 105)),
    "Baseline": made_up(2500, 0.0, (2000, 3000)),
    "exact": made_up(1000, 0.0, moved=0.625),
    "SEMI": made_up(1250, 0.6, moved=0.5),
}
#: As long as any name and number of a run may be.
LONGEST = {run.name: made_up(123456, 0.9, moved=0.25) for run in RUNS}


def printed(results: dict[str, dict[str, Any]]) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(results_table(results))
    return captured.get().splitlines()


def test_the_table_fits_80_columns_and_explains_itself() -> None:
    assert max(map(len, printed(LONGEST))) <= 80 and not any("…" in line for line in printed(LONGEST))
    lines = printed(RESULTS)
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "One slow rank, without and with balancing"
    headings = lines[2]
    for heading in ("run", "step, ms", "speed-up", "slowdown", "moved", "lent", "dropped", "accuracy"):
        assert heading in headings
    by_name = {name: cells for name, *cells in map(str.split, filter(str.strip, lines))}
    assert by_name["exact"] == ["1000", "2.50×", "10.00×", "0.62", "0.00", "0.00", "75.0%"]
    # Half is left to rank 1; of that 0.2 is lent and 0.6 dropped.
    assert by_name["SEMI"] == ["1250", "2.00×", "12.50×", "0.50", "0.10", "0.30", "75.0%"]
    caption = " ".join(" ".join(lines).split())
    for words in ("nobody slow", "rank 1 slow, nothing done", "the default", "both are exact", "only 60 steps"):
        assert words in caption
    assert "shorter than homogeneous" not in caption, "none is"
    assert "by halves before and after the other runs: homogeneous 95 and 105 ms, Baseline 2000 and 3000 ms." in caption


def plain_turns(training: TrainingConfig) -> list[tuple[str, int, bool]]:
    return [(turn.run.name, turn.until_epoch, turn.goes_on) for turn in turns(training)]


def test_what_all_are_compared_with_trains_before_and_after_them() -> None:
    assert plain_turns(load_config("demo", ()).training) == [
        ("homogeneous", 1, False),
        ("Baseline", 1, False),
        ("exact", 2, False),
        ("ZERO-PriDiffR", 2, False),
        ("MIG", 2, False),
        ("SEMI", 2, False),
        ("Baseline", 2, True),
        ("homogeneous", 2, True),
    ]


@pytest.mark.parametrize("training", [TrainingConfig(epochs=1), TrainingConfig(epochs=4, lr_schedule="cosine")])
def test_a_run_that_cannot_be_halved_trains_at_once(training: TrainingConfig) -> None:
    assert plain_turns(training) == [(run.name, training.epochs, False) for run in RUNS]


def test_the_halves_of_a_run_are_told_without_their_first_steps(tmp_path: Any) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for begin, seconds in ((0, [9.0, 3.0, 0.2, 0.3, 0.2]), (5, [9.0, 0.5, 0.4, 0.5])):
        step = begin + len(seconds) - 1
        lines.write({"kind": "epoch", "step": step, "from_step": begin, "ratios": [], "seconds": seconds})
    lines.close()
    assert results_of(tmp_path, settle_steps=2)["halves_ms"] == pytest.approx([200, 450])


def test_a_configuration_that_is_wrong_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main([f"--output={tmp_path}", "--set=training.epochs=0"]) == 2
    assert "error: training.epochs=0" in capsys.readouterr().out


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end as soon as they begin."""

    def train(config: str, overrides: Any, folder: Path, turn: Any) -> Iterator[tuple[int, int | None, str]]:
        assert list(folder.iterdir()) == []
        with pytest.raises(ValueError, match="another run is writing there"), claimed(folder.parent):
            pass
        yield 1, 1, "done"

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "results_of", lambda *_: made_up(100, 0.0))
    monkeypatch.setattr(demo, "save_picture", lambda *_, **__: None)


@pytest.mark.parametrize("holder", ["demo", "run"])
def test_a_demo_whose_folder_is_in_use_is_refused_and_deletes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], untrained: None, holder: str
) -> None:
    for run in RUNS:
        (tmp_path / run.name.lower()).mkdir()
        (tmp_path / run.name.lower() / "metrics.jsonl").touch()
    with claimed(tmp_path / "semi" if holder == "run" else tmp_path):
        assert main([f"--output={tmp_path}", "--set=training.epochs=1"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "error: " in line]
    assert "another run is writing there" in line
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == len(RUNS)
    assert main([f"--output={tmp_path}", "--set=training.epochs=1"]) == 0  # in emptied folders


def test_ctrl_c_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main([f"--output={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted: the same command begins anew\n"


def test_only_runs_that_relieve_the_slow_rank_are_drawn_below_and_one_legend_names_all() -> None:
    figure = draw(RESULTS, straggler=1)
    times, ratios = figure.axes
    assert [line.get_label() for line in times.lines] == list(RESULTS)
    assert [line.get_label() for line in ratios.lines] == ["exact", "SEMI"]
    assert [line.get_ydata().tolist() for line in ratios.lines] == [[0.625] * 12, pytest.approx([0.8] * 12)]
    assert times.get_legend() is None and ratios.get_legend() is None  # neither covers a curve
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(RESULTS)
    assert ratios.lines[0].get_color() == times.lines[2].get_color()
    pyplot.close(figure)


def test_the_picture_shows_all_but_the_first_steps_of_each_start() -> None:
    figure = draw(RESULTS, straggler=1)
    times, ratios = figure.axes
    assert times.get_ylim() == (0, pytest.approx(1.05 * 2500))  # not 250,000, which the first steps took
    assert ratios.get_xlim() == (0, 12)
    curve = times.lines[0].get_xydata()
    assert [x for x, y in curve if y != y] == [6.0]  # it is broken where the second half began
    pyplot.close(figure)


def test_what_was_dropped_is_told_over_all_steps() -> None:
    records = [{"step": 10, "lent": 0.0}, {"step": 20, "lent": 0.5}, {"step": 40, "lent": 1.0}]
    assert mean_in_force(records, "lent", 40) == pytest.approx(0.25)
    assert mean_in_force(records, "lent", 50) == pytest.approx(0.4)
    assert mean_in_force([], "lent", 50) == 0.0
