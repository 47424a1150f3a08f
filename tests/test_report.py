"""A run's folder as pictures and a page."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import pyplot

from scripts.report import brought_rows, table_rows, write_report
from scripts.report_pictures import (
    layers_picture,
    loans_over_time_picture,
    loans_picture,
    times_picture,
    work_picture,
)
from scripts.report_run import RunFolder
from vit_examples.balance_log import BalanceLog
from zeroresize.telemetry import JsonLinesTelemetry, UpdateRecord

ROOT = Path(__file__).parent.parent
LAYERS = ("fc1", "fc2")


def record(rank, update, ratio):
    return UpdateRecord(
        update=update,
        step=10 * update,
        epoch=0,
        rank=rank,
        busy_s=float("nan") if update == 1 else 0.2,
        products_s=float("nan") if update == 1 else 0.1,
        is_straggler=ratio > 0,
        ratio=ratio,
        pruned_share=ratio,
        lent_share=0.0,
        borrowed_share=0.0,
        lent_to={},
        layer_shares=dict.fromkeys(LAYERS, ratio),
        predicted_step_s=0.2,
        begins_at_full_work=False,
        balancing_s=0.05,
    )


@pytest.fixture
def folder(tmp_path):
    """A run in which rank 1 straggles from its second update on."""
    for rank in range(2):
        write = JsonLinesTelemetry(tmp_path / f"balance-rank{rank}.jsonl")
        for update in range(1, 5):
            write(record(rank, update, 0.5 if rank == 1 and update > 1 else 0.0))
        write.close()
        columns = {layer: np.arange(8) * rank for layer in LAYERS}
        np.savez_compressed(tmp_path / f"columns-rank{rank}.npz", **columns)
    steps = [{"kind": "step", "step": step, "step_s": 0.25 if step else None} for step in range(40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return tmp_path


def test_the_page_shows_every_rank_and_pictures_of_those_that_pruned(folder, tmp_path):
    page = write_report(RunFolder.read(folder), tmp_path / "report").read_text()
    assert len(re.findall(r"<img [^>]*base64,[A-Za-z0-9+/=]{1000,}", page)) == 4
    assert "Rank 1: share" in page and "Rank 0: share" not in page
    assert "the run has not ended" in page
    pictures = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert pictures == ["columns-rank1.png", "layers-rank1.png", "times.png", "work.png"]


def test_the_table_tells_who_was_slow_and_what_balancing_cost(folder):
    (normal, slow) = table_rows(RunFolder.read(folder))
    assert normal[:2] == ["0", "4"] and slow[:2] == ["1", "4"]
    assert slow[2:6] == ["200.0", "100.0", "0.50", "0.50"]
    assert normal[6:10] == ["0.0 %"] * 3 + ["0 updates"] and slow[6:10] == ["25.0 %", "0.0 %", "0.0 %", "3 updates"]
    # It dropped half in steps 20 to 40 of 40; what it decided at step 40 was never in force.
    assert slow[10] == "2.00 % of a step"  # 3 × 50 ms in 30 steps of 250 ms


def test_it_shows_who_lent_what_to_whom_and_what_the_step_would_have_taken(tmp_path):
    shares = {0: (0.0, 0.25, {}), 1: (0.5, 0.0, {"0": 0.25, "2": 0.25}), 2: (0.0, 0.25, {})}
    for rank, (lent, borrowed, lent_to) in shares.items():
        write = JsonLinesTelemetry(tmp_path / f"balance-rank{rank}.jsonl")
        for update in (1, 2, 3):
            told = record(rank, update, 0.0)
            changes = {"lent_share": lent, "borrowed_share": borrowed, "lent_to": lent_to} if update > 1 else {}
            write(dataclasses.replace(told, busy_s=0.2 * (1 + rank), **changes))
        write.close()
    (tmp_path / "metrics.jsonl").write_text("")
    run = RunFolder.read(tmp_path)

    assert run.slowest_at_full_work() == ([10, 20, 30], [pytest.approx(0.6)] * 3)
    figure = loans_picture(run)
    assert {text.get_position(): text.get_text() for text in figure.axes[0].texts} == {(0, 1): "0.08", (2, 1): "0.08"}
    pyplot.close(figure)  # a quarter in steps 20 to 30 of 30
    figure = loans_over_time_picture(run)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    lent = [[10, 0], [20, 0.25], [30, 0.25], [30, 0.25]]
    assert drawn == {"rank 1 to 0": lent, "rank 1 to 2": lent}
    assert figure.axes[0].lines[0].get_drawstyle() == "steps-post"
    pyplot.close(figure)
    figure = work_picture(run)
    heights = [areas.get_paths()[0].get_extents().y1 for areas in figure.axes[0].collections]
    assert heights == pytest.approx([1.0, 1.0, 1.0, 1.25])  # rank 0 computes its own and a quarter more
    pyplot.close(figure)
    written = {path.name for path in write_report(run, tmp_path / "report").parent.glob("loans*.png")}
    assert written == {"loans.png", "loans-over-time.png"}


def test_it_tells_what_balancing_brought_over_the_steps_of_which_both_times_are_known(tmp_path):
    """Records tell of steps 10 to 30, where lines of 10, 5 and 5 steps were measured."""
    for rank in range(2):
        write = JsonLinesTelemetry(tmp_path / f"balance-rank{rank}.jsonl")
        for update, busy_s in ((1, float("nan")), (2, 0.6), (3, 0.9)):
            write(dataclasses.replace(record(rank, update, 0.0), busy_s=busy_s if rank else 0.1))
        write.close()
    lines = [(9, 1.0), (19, 0.3), (24, 0.4), (29, 0.6), (39, 2.0)]
    steps = [{"kind": "step", "step": step, "step_s": step_s} for step, step_s in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    run = RunFolder.read(tmp_path)
    assert run.measured_and_at_full_work() == pytest.approx((0.4, 0.75))
    page = write_report(run, tmp_path / "report").read_text()
    assert "400.0 ms" in page and "750.0 ms" in page and "at least 1.88 times as long" in page
    figure = times_picture(run)
    (measured,) = figure.axes[0].patches
    values, edges, _ = measured.get_data()
    assert edges.tolist() == [0, 10, 20, 25, 30, 40]
    assert values == pytest.approx([1e3 * step_s for _, step_s in lines])
    pyplot.close(figure)


def test_without_times_it_does_not_tell_what_balancing_brought(folder, tmp_path):
    (folder / "metrics.jsonl").write_text("")
    run = RunFolder.read(folder)
    assert brought_rows(run) == [("mean step, measured and at full work", "not known")]
    assert table_rows(run)[1][10] == "-"
    assert write_report(run, tmp_path / "report").is_file()


def test_what_a_rank_takes_in_is_shown_whole_below_one_that_only_lends(tmp_path):
    for rank, (lent, borrowed) in enumerate([(0.5, 0.0), (0.0, 0.5)]):
        write = JsonLinesTelemetry(tmp_path / f"balance-rank{rank}.jsonl")
        for update in (1, 2):
            write(dataclasses.replace(record(rank, update, 0.0), lent_share=lent, borrowed_share=borrowed))
        write.close()
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
    assert columns == [10, 20, 30, 40, 41]
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


def test_what_is_no_run_is_named(tmp_path):
    command = [sys.executable, "-m", "scripts.report", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"error: {tmp_path}: no balance-rank*.jsonl there" in result.stderr
