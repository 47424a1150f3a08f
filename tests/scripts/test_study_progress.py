"""What a study shows of how far it is, with cells that take minutes."""

from __future__ import annotations

import io

import pytest
from helpers.virtual_training import FakeTime

pytest.importorskip("rich")

from rich.console import Console

from scripts.study.progress import CellTimes, StudyProgress


def test_what_is_left_is_the_mean_of_all_finished_cells_for_each_that_is_left() -> None:
    time = FakeTime()
    times = CellTimes(5, time.clock)
    assert times.left_s() is None
    for seconds, has_failed, left_s in ((240.0, False, 4 * 240.0), (1.0, True, 3 * 240.0), (360.0, False, 2 * 300.0)):
        times.begin()
        time.sleep(seconds)
        assert times.end(has_failed=has_failed) == seconds
        assert times.left_s() == left_s
    times.begin()
    time.sleep(100.0)
    assert times.left_s() == 500.0
    time.sleep(1000.0)  # longer than any: the other cells are left
    assert times.left_s() == 300.0


def test_a_log_file_gets_a_line_a_cell() -> None:
    stream, time = io.StringIO(), FakeTime()
    with StudyProgress(30, 10, Console(file=stream), time.clock) as progress:
        for cell, seconds, has_failed in (("MIG χ=2, seed 0", 250, False), ("SEMI [γ], seed 0", 2, True)):
            progress.begin(cell)
            time.sleep(seconds)
            progress.end(has_failed=has_failed)
    assert stream.getvalue().splitlines() == [
        "11/30 finished: MIG χ=2, seed 0, 0:04:10; left 1:19:10",
        "12/30 failed: SEMI [γ], seed 0, 0:00:02; left 1:15:00",
    ]


def test_a_terminal_shows_what_is_left_after_the_first_cell_and_while_the_next_runs() -> None:
    stream, time = io.StringIO(), FakeTime()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with StudyProgress(3, 0, console, time.clock) as progress:
        progress.begin("first")
        time.sleep(250)
        progress.end(has_failed=False)
        progress.begin("second")
        time.sleep(50)
    said = stream.getvalue()
    assert "second" in said and "1/3" in said and "left 0:07:30" in said
