"""A run's folder as pictures and a page."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from helpers.runs import LAYERS, epoch_of, record, write_metrics, write_records, write_run
from matplotlib import pyplot

from scripts.report.__main__ import write_report
from scripts.report.gain import gain_of
from scripts.report.page import fact_rows, loan_rows, move_rows, rank_rows
from scripts.report.pictures import (
    layers_picture,
    loans_over_time_picture,
    loans_picture,
    times_picture,
    units_picture,
    work_picture,
)
from scripts.report.run import WORK, Moves, RunFolder
from vit_examples.balance_log import BalanceLog, mean_in_force

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """A run in which rank 1 straggles from its second update on."""
    for rank in range(2):
        write_records(tmp_path, rank, [record(rank, update, 0.5 * (rank == 1 < update)) for update in range(1, 5)])
        columns = {layer: np.arange(8) * rank for layer in LAYERS}
        np.savez_compressed(tmp_path / f"columns-rank{rank}.npz", **columns)
    write_metrics(tmp_path, [{"kind": "step", "step": step, "step_s": 0.25 if step else None} for step in range(40)])
    return tmp_path


def test_the_page_shows_every_rank_and_pictures_of_those_that_pruned(folder, tmp_path):
    page = write_report(RunFolder.read(folder), tmp_path / "report").read_text()
    assert len(re.findall(r"<img [^>]*base64,[A-Za-z0-9+/=]{1000,}", page)) == 4
    assert "Rank 1: share" in page and "Rank 0: share" not in page
    assert "the run has not ended" in page
    pictures = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert pictures == ["columns-rank1.png", "layers-rank1.png", "times.png", "work.png"]


def test_the_table_tells_who_was_slow_and_what_balancing_cost(folder):
    (normal, slow) = rank_rows(RunFolder.read(folder))
    assert normal[:2] == ["0", "4"] and slow[:2] == ["1", "4"]
    assert slow[2:6] == ["200.0", "100.0", "0.50", "0.50"]
    assert normal[6:10] == ["0.0 %"] * 3 + ["0 updates"] and slow[6:10] == ["25.0 %", "0.0 %", "0.0 %", "3 updates"]
    # It dropped half in steps 20 to 40 of 40; what it decided at step 40 was never in force.
    assert slow[10] == "2.00 % of a step"  # 3 × 50 ms in 30 steps of 250 ms


@pytest.fixture
def lending(tmp_path):
    """A run in which rank 1 of three lends from its second update on, half of it to each of the others."""
    shares = {0: (0.0, 0.25, {}), 1: (0.5, 0.0, {"0": 0.25, "2": 0.25}), 2: (0.0, 0.25, {})}
    for rank, (lent, borrowed, lent_to) in shares.items():
        in_force = {"lent": lent, "borrowed": borrowed, "lent_to": lent_to}
        busy_s = 0.2 * (1 + rank)
        records = [record(rank, update, 0.0, busy_s=busy_s, **in_force if update > 1 else {}) for update in (1, 2, 3)]
        write_records(tmp_path, rank, records)
    write_metrics(tmp_path, [])
    return tmp_path


def test_it_shows_who_lent_what_to_whom(lending):
    run = RunFolder.read(lending)
    assert run.slowest_at_full_work().tolist() == pytest.approx([0.6] * 30)
    figure = loans_picture(run)
    assert {text.get_position(): text.get_text() for text in figure.axes[0].texts} == {(0, 1): "0.08", (2, 1): "0.08"}
    pyplot.close(figure)  # a quarter in steps 20 to 30 of 30
    figure = loans_over_time_picture(run)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    lent = [[0, 0], [20, 0.25], [30, 0.25], [30, 0.25]]
    assert drawn == {"rank 1 to 0": lent, "rank 1 to 2": lent}
    assert figure.axes[0].lines[0].get_drawstyle() == "steps-post"
    pyplot.close(figure)
    figure = work_picture(run)
    heights = [areas.get_paths()[0].get_extents().y1 for areas in figure.axes[0].collections]
    assert heights == pytest.approx([1.0, 1.0, 1.25])  # rank 0 computes its own and a quarter more
    pyplot.close(figure)


@pytest.fixture
def moving(tmp_path):
    """A run of 40 steps and two ranks: rank 1's units move at step 20 for the most part, and are saved at step 30."""
    units = {1: {"heads": 6, "neurons": 100}, 2: {"heads": 2, "neurons": 60}}
    for rank in range(2):
        records = []
        for update in (1, 2, 3, 4):
            is_away = update >= 2
            units_of_rank_1 = units[1 + is_away]
            records.append(
                record(
                    rank,
                    update,
                    0.0,
                    owned=(0.4 if rank else 1.6) if is_away else 1.0,
                    units=units_of_rank_1
                    if rank
                    else {kind: 2 * units[1][kind] - number for kind, number in units_of_rank_1.items()},
                    moved_bytes={2: 3_000_000, 3: 8_000_000}.get(update, 0),
                    moving_s={2: 0.25, 3: 0.5}.get(update, 0.0),
                    busy_s=0.4 if rank else 0.1,
                )
            )
        write_records(tmp_path, rank, records)
    write_metrics(tmp_path, [epoch_of([0.4] * 20 + [0.2] * 20)])
    return tmp_path


def test_it_tells_what_moved_when_with_bytes_and_seconds(moving, tmp_path):
    run = RunFolder.read(moving)
    rows = move_rows(run.moves())
    assert rows == [
        ["20", "rank 0: +4 heads, +40 neurons; rank 1: −4 heads, −40 neurons", "3", "0.25"],
        ["30", "nothing in the end: home and back for a checkpoint, or away again after a resume", "8", "0.5"],
    ]
    page = write_report(run, tmp_path / "report").read_text()
    assert all(cell in page for row in rows for cell in row)
    assert "How many units of each kind every rank owns." in page


def test_the_table_of_ranks_tells_who_owns_what_and_leaves_out_what_there_is_not(moving, tmp_path):
    run = RunFolder.read(moving)
    (taker, giver) = rank_rows(run)
    assert taker[11:] == ["160.0 %", "10 heads, 140 neurons", "0.0 %", "30.0 %"]  # 0.6 in steps 20 to 40 of 40
    assert giver[11:] == ["40.0 %", "2 heads, 60 neurons", "30.0 %", "0.0 %"]
    page = write_report(run, tmp_path / "report").read_text()
    headings = re.findall("<th>(.*?)</th>", page.partition("<h3>Ranks")[2].partition("<h3>Moves")[0])
    assert "owns now" in headings and "units now" in headings
    assert not {"γ", "γ, most", "dropped", "lent", "borrowed"} & set(headings)


def test_a_run_in_which_nothing_moved_does_not_speak_of_units(folder, tmp_path):
    page = write_report(RunFolder.read(folder), tmp_path / "report").read_text()
    headings = re.findall("<th>(.*?)</th>", page)
    assert {"γ", "dropped"} <= set(headings)
    assert not {"owns now", "units now", "moved", "taken over", "lent"} & set(headings)
    assert "Moves" not in page and not list((tmp_path / "report").glob("units*"))


def test_what_is_a_whole_share_but_for_the_last_bits_has_not_moved(tmp_path):
    """A share is a sum over layers."""
    write_records(tmp_path, 0, [record(0, 1, 0.0, owned=1.0000000000000002, units={"heads": 6})])
    run = RunFolder.read(tmp_path)
    assert not run.has_moved and isinstance(gain_of(run), str)


def test_a_run_of_before_units_could_move_is_read_as_one_in_which_none_did(folder):
    now = RunFolder.read(folder)
    for file in folder.glob("balance-rank*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        old = [
            {key: value for key, value in line.items() if key not in ("owned", "units", "moved_bytes", "moving_s")}
            for line in lines
        ]
        assert all(len(one) + 4 == len(line) for one, line in zip(old, lines, strict=True))
        file.write_text("".join(json.dumps(one) + "\n" for one in old))
    old = RunFolder.read(folder)
    assert rank_rows(old) == rank_rows(now) and not old.has_moved and old.moves() == []


def test_the_pictures_show_who_owns_how_many_units_over_time(moving):
    run = RunFolder.read(moving)
    figure = units_picture(run)
    drawn = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]
    assert [axes.get_ylabel() for axes in figure.axes] == ["heads of all layers", "neurons of all layers"]
    heads, neurons = ([[[0, a], [20, b], [30, b], [40, b], [40, b]] for a, b in sizes] for sizes in
                      (((6, 10), (6, 2)), ((100, 140), (100, 60))))  # fmt: skip
    assert drawn == [heads, neurons]
    assert all(line.get_drawstyle() == "steps-post" for axes in figure.axes for line in axes.lines)
    pyplot.close(figure)
    figure = work_picture(run)
    assert legend_of(figure) == ["its own, computed here", "moved to others", "taken over from others"]
    top = {axes.get_ylabel(): [one.get_paths()[0].get_extents().y1 for one in axes.collections] for axes in figure.axes}
    assert top["rank 0"] == pytest.approx([1.0, 1.0, 1.6]) and top["rank 1"] == pytest.approx([1.0, 1.0, 1.0])
    pyplot.close(figure)
    figure = times_picture(run)
    computed = [line.get_ydata().tolist() for line in figure.axes[2].lines]
    assert computed == [pytest.approx([1.0, *[1.6] * 4]), pytest.approx([1.0, *[0.4] * 4])]
    assert figure.axes[2].get_ylim()[1] > 1.6
    pyplot.close(figure)


def test_what_is_lent_and_dropped_of_what_is_left_is_told_as_part_of_an_even_share(tmp_path):
    left = {"owned": 0.5, "lent": 0.2, "pruned": 0.4, "lent_to": {"0": 0.2}}
    write_records(tmp_path, 0, [record(0, 1, 0.0, owned=1.5, borrowed=0.1)])
    write_records(tmp_path, 1, [record(1, 1, 0.0, **left)])
    write_metrics(tmp_path, [epoch_of([0.2] * 10)])
    run = RunFolder.read(tmp_path)
    parts = [{name: run.mean_work(rank, name) for name in WORK} for rank in range(2)]
    nothing = dict.fromkeys(WORK, 0.0)
    assert parts[0] == pytest.approx({**nothing, "kept": 1.0, "taken": 0.5, "borrowed": 0.1})
    assert parts[1] == pytest.approx({**nothing, "kept": 0.2, "lent": 0.1, "pruned": 0.2, "moved": 0.5})
    assert run.mean_lent(1, 0) == pytest.approx(0.1)


def test_of_many_moves_and_of_many_ranks_the_table_stays_short():
    changes = {rank: {"neurons": -rank if rank else 1} for rank in range(100)}
    moves = [Moves(10 * number, changes, 2_000_000, 0.5) for number in range(1, 51)]
    rows = move_rows(moves)
    assert len(rows) == 41 and rows[-1] == ["later", "10 more moves", "20", "5"]
    assert rows[0][1].startswith("rank 92: −92 neurons; ") and rows[0][1].endswith("; less of 92 other ranks")


@pytest.mark.slow
def test_few_loans_are_told_in_words_and_many_are_drawn(lending, tmp_path, monkeypatch):
    run = RunFolder.read(lending)
    few = {path.name for path in write_report(run, tmp_path / "few").parent.glob("loans*.png")}
    words = [(f"rank 1 lent to rank {receiver}", "0.08 of its even share, mean of all steps") for receiver in (0, 2)]
    assert few == {"loans-over-time.png"} and loan_rows(run) == words
    monkeypatch.setattr("scripts.report.page.MOST_IN_WORDS", 1)
    many = {path.name for path in write_report(run, tmp_path / "many").parent.glob("loans*.png")}
    assert many == {"loans.png", "loans-over-time.png"} and loan_rows(run) == []


def test_a_matrix_of_few_ranks_is_small(lending):
    figure = loans_picture(RunFolder.read(lending))
    assert max(figure.get_size_inches()) < 4.5
    pyplot.close(figure)


def test_the_page_has_one_mean_step_and_it_is_that_of_the_summary(tmp_path):
    """The first steps of each start are left out of it, also while the run goes on."""
    seconds = [9.0] * 5 + [0.2] * 30 + [0.3] * 5
    ended = {"step_ms": 200.0, "mean_step_ms": 214.2857}
    for name, summary in (("ended", ended), ("going on", None)):
        run = RunFolder.read(write_run(tmp_path / name, "zero-pri", seconds, summary=summary))
        assert run.speed() == pytest.approx(ended)
        facts = dict(fact_rows(run))
        assert facts["mean step, ms, without the first 5 steps of a start"] == "214.3"
        page = write_report(run, tmp_path / "report").read_text()
        assert page.count("mean step") == 1


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ((18,), ", without the first 9 steps of a start"),
        ((60,), ", without the first 20 steps of a start"),
        ((18, 60), ", without the first 9 to 20 steps of a start"),
        ((3,), ", without the first step of a start"),
        ((1,), ""),
    ],
)
def test_so_many_first_steps_are_left_out_as_the_page_says(tmp_path, starts, said):
    run = write_run(tmp_path, "zero-pri", [0.2] * 100, output={"settle_steps": 20})
    begins = [sum(starts[:number]) for number in range(len(starts))]
    epochs = zip(starts, begins, strict=True)
    write_metrics(run, [epoch_of([0.2] * length, begin=begin, from_step=begin) for length, begin in epochs])
    assert next(name for name, _ in fact_rows(RunFolder.read(run))) == f"mean step, ms{said}"


def test_measured_times_are_drawn_over_the_steps_before_their_lines(folder):
    lines = [(9, 1.0), (19, 0.3), (24, 0.4), (29, 0.6), (39, 2.0)]
    write_metrics(folder, [{"kind": "step", "step": step, "step_s": step_s} for step, step_s in lines])
    figure = times_picture(RunFolder.read(folder))
    (measured,) = figure.axes[0].patches
    values, edges, _ = measured.get_data()
    assert edges.tolist() == [0, 10, 20, 25, 30, 40]
    assert values == pytest.approx([1e3 * step_s for _, step_s in lines])
    pyplot.close(figure)


def test_steps_without_balancing_are_marked(tmp_path):
    slow = [record(1, update, 0.5 * (update > 1), busy_s=0.4) for update in range(1, 5)]
    figure = times_picture(RunFolder.read(write_run(tmp_path, "zero-pri", [0.4] * 20 + [0.2] * 20, slow)))
    (marked,) = [line for line in figure.axes[0].lines if line.get_label() == "without balancing"]
    assert marked.get_xdata().tolist() == [step + 0.5 for step in range(5, 20)]
    pyplot.close(figure)


def legend_of(figure, axes=None):
    legend = axes.get_legend() if axes is not None else figure.legends[0] if figure.legends else None
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_legends_name_only_what_is_there(folder):
    run = RunFolder.read(folder)  # nothing is lent
    figure = work_picture(run)
    assert legend_of(figure) == ["its own, computed here", "dropped"]
    pyplot.close(figure)
    figure = times_picture(run)
    assert legend_of(figure, figure.axes[0]) == ["measured", "without balancing", "predicted"]
    pyplot.close(figure)
    for rank in range(2):
        records = [record(rank, update, 0.0, predicted_step_s=float("nan")) for update in (1, 2)]
        write_records(folder, rank + 2, records)
        (folder / f"balance-rank{rank}.jsonl").unlink()
    run = RunFolder.read(folder)
    figure = work_picture(run)
    assert legend_of(figure) == []
    pyplot.close(figure)
    figure = times_picture(run)
    assert legend_of(figure, figure.axes[0]) == ["measured"]
    pyplot.close(figure)


def test_the_least_step_that_drops_nothing_is_drawn_where_it_is_known(tmp_path):
    times = {2: 0.375, 3: 0.25}
    records = [record(0, update, 0.0, bound_s=times.get(update, float("nan"))) for update in (1, 2, 3)]
    write_records(tmp_path, 0, records)
    write_metrics(tmp_path, [{"kind": "step", "step": step, "step_s": 0.4 if step else None} for step in range(30)])
    figure = times_picture(RunFolder.read(tmp_path))
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "T*, the least that drops nothing"]
    assert line.get_ydata()[1:].tolist() == [375.0, 250.0] and np.isnan(line.get_ydata()[0])
    pyplot.close(figure)


def test_axes_of_steps_have_whole_steps(tmp_path):
    records = [record(1, update, 0.5 * (update > 1), step=update, busy_s=0.4) for update in (1, 2, 3)]
    run = RunFolder.read(write_run(tmp_path, "zero-pri", [0.4] * 3, records))
    for draw in (times_picture, work_picture, lambda run: layers_picture(run, 1)):
        figure = draw(run)
        figure.canvas.draw()
        axes = [one for one in figure.axes if one.get_xlabel() == "optimizer step"]
        assert axes and all(tick == round(tick) for one in axes for tick in one.get_xticks())
        pyplot.close(figure)


def test_without_times_it_does_not_tell_what_balancing_brought(folder, tmp_path):
    (folder / "metrics.jsonl").write_text("")
    run = RunFolder.read(folder)
    assert rank_rows(run)[1][10] == "-"
    page = write_report(run, tmp_path / "report").read_text()
    assert "not known: too few steps without balancing" in page and "mean step" not in page


def test_a_ratio_forced_on_named_ranks_is_in_force_from_the_first_step(tmp_path):
    """The table and all pictures tell of the same steps."""
    lends = {"pruned": 0.5, "lent": 0.25, "lent_to": {"0": 0.25}}
    always = [record(1, update, 0.75, **lends) for update in (1, 2)]
    balance = {"mode": "zero-pri", "ratio": 0.75, "ranks": [1]}
    run = RunFolder.read(write_run(tmp_path / "whole", "zero-pri", [0.2] * 25, always, balance=balance))
    late = RunFolder.read(write_run(tmp_path / "late", "zero-pri", [0.2] * 25, always[1:], balance=balance))
    for folder in (run, late):  # of the second one the first records were lost
        assert rank_rows(folder)[1][6:8] == ["50.0 %", "25.0 %"]
        assert loan_rows(folder) == [("rank 1 lent to rank 0", "0.25 of its even share, mean of all steps")]
    assert mean_in_force(run.records[1], "pruned", 25) == pytest.approx(0.5)
    pictures = times_picture(run), work_picture(run), loans_over_time_picture(run), layers_picture(run, 1)
    times, work, loans, layers = pictures
    assert times.axes[2].lines[1].get_xydata().tolist() == [[0, 0.75], [20, 0.75], [25, 0.75]]
    dropped = work.axes[1].collections[2].get_paths()[0].get_extents()
    assert (dropped.x0, dropped.x1, dropped.y0, dropped.y1) == pytest.approx((0, 25, 0.5, 1.0))
    assert loans.axes[0].lines[0].get_xydata().tolist() == [[0, 0.25], [20, 0.25], [25, 0.25]]
    assert layers.axes[0].collections[0].get_coordinates()[0, :, 0].tolist() == [0, 20, 25]
    assert isinstance(gain_of(run), str)  # no step was at full work
    for picture in pictures:
        pyplot.close(picture)


def test_a_ratio_that_is_decided_before_the_first_record_that_is_there_is_not_known(tmp_path):
    later = [record(1, update, 0.5) for update in (2, 3)]
    run = RunFolder.read(write_run(tmp_path, "zero-pri", [0.2] * 40, later, balance={"mode": "zero-pri"}))
    assert rank_rows(run)[1][6] == "25.0 %" and run.plan_begins(1) == [20, 30]


def test_what_a_rank_takes_in_is_shown_whole_below_one_that_only_lends(tmp_path):
    for rank, (lent, borrowed) in enumerate([(0.5, 0.0), (0.0, 0.5)]):
        in_force = {"lent": lent, "borrowed": borrowed}
        write_records(tmp_path, rank, [record(rank, update, 0.0, **in_force) for update in (1, 2)])
    (tmp_path / "metrics.jsonl").write_text("")
    figure = work_picture(RunFolder.read(tmp_path))
    assert all(axes.get_ylim()[1] >= 1.5 for axes in figure.axes[:2])
    pyplot.close(figure)


def test_a_plan_is_drawn_over_the_steps_after_its_record_and_a_time_over_those_before(folder):
    """Rank 1 prunes from step 20 on; what it needed until step 20 was measured in steps 10 to 20."""
    run = RunFolder.read(folder)
    figure = layers_picture(run, 1)
    mesh = figure.axes[0].collections[0]
    columns = mesh.get_coordinates()[0, :, 0].tolist()
    assert columns == [0, 20, 30, 40, 41]
    assert mesh.get_array().reshape(len(LAYERS), -1)[0].tolist() == [0.0, 0.5, 0.5, 0.5]
    pyplot.close(figure)
    figure = times_picture(run)
    busy, gamma = figure.axes[1].lines[1], figure.axes[2].lines[1]
    assert busy.get_drawstyle() == "steps-pre" and gamma.get_drawstyle() == "steps-post"
    pyplot.close(figure)


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_read(folder):
    with (folder / "balance-rank1.jsonl").open("a") as lines:
        lines.write('{"update": 5, "st')
    assert len(RunFolder.read(folder).records[1]) == 4


def test_a_run_of_which_some_rank_or_file_is_not_written_yet_is_read(folder, tmp_path):
    (folder / "balance-rank2.jsonl").touch()
    (folder / "unfinished-columns-rank0.npz").write_bytes(b"half")
    run = RunFolder.read(folder)
    assert sorted(run.records) == sorted(run.columns) == [0, 1]
    assert write_report(run, tmp_path / "report").is_file()
    for file in folder.glob("balance-rank*.jsonl"):
        file.write_text("")
    with pytest.raises(ValueError, match="no update yet"):
        RunFolder.read(folder)


def test_a_file_of_columns_is_never_seen_unfinished(tmp_path, monkeypatch):
    """Whatever is there while it is being written is not taken for it."""
    seen = []
    write_bytes = Path.write_bytes

    def write(path, content):
        write_bytes(path, content[: len(content) // 2])
        seen.extend(tmp_path.glob("columns-rank*.npz"))
        write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    log = BalanceLog(tmp_path, 0, from_step=0)
    log.epoch(SimpleNamespace(pruned_steps=lambda: {"up": np.arange(3)}))
    log.close()
    assert seen == []
    assert np.load(tmp_path / "columns-rank0.npz")["up"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_what_is_no_run_is_named(tmp_path):
    command = [sys.executable, "-m", "scripts.report", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"error: {tmp_path}: no balance-rank*.jsonl there" in result.stderr
