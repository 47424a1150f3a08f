"""What a run shows and records on rank 0, and how ranks leave together."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("tensorboard")

from vit_examples import host
from vit_examples.config import OutputConfig, RunConfig
from vit_examples.display import Display
from vit_examples.recorder import Recorder

MANY = [0.5, 0.25, *[0.0] * 6]


@pytest.mark.parametrize(
    ("ratios", "slow", "end"),
    [
        ([0.0, 0.5], [1], "γ 0.00 0.50, slow 1"),
        ([0.0] * 3 + [0.9] + [0.0] * 60, [3], "γ 0.90 on 3, slow 3"),
        (MANY, list(range(8)), "γ 0.00–0.50, slow 8 ranks"),
        ([0.0] * 8, [], "γ 0.00, slow –"),
        ([], [], "γ –, slow –"),
    ],
)
def test_a_log_file_gets_one_short_line_an_epoch(ratios: list[float], slow: list[int], end: str) -> None:
    stream = io.StringIO()
    with Display("title", 10, done_steps=0, enabled=True, console=Console(file=stream)) as display:
        display.step(1)
        display.epoch(150, 2.3456, 12345.0, 1.0, ratios, slow)
    said = stream.getvalue()
    assert said == f"title\nepoch 150: loss 2.346, 12345 ms/step, accuracy 100.0%, {end}\n"
    assert max(map(len, said.splitlines())) <= 80


def test_a_row_of_a_terminals_table_fits_80_columns() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with Display("title", 10, done_steps=0, enabled=True, console=console) as display:
        display.epoch(150, 2.3456, 12345.0, 1.0, MANY, list(range(8)))
    assert "│   150 │ 2.346 │   12345 │        100.0% │ 0.00–0.50 │    8 ranks │" in stream.getvalue()


def test_a_display_that_is_off_says_nothing() -> None:
    stream = io.StringIO()
    with Display("title", 10, done_steps=0, enabled=False, console=Console(file=stream)) as display:
        display.epoch(1, 1.0, 1.0, 1.0, [0.0], [])
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("num_ranks", "num_shown"), [(2, 2), (20, 16)])
def test_an_epoch_records_the_mean_ratio_of_each_rank(tmp_path: Path, num_ranks: int, num_shown: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig(output=OutputConfig(folder=str(tmp_path)))
    recorder = Recorder(config, from_epoch=0, from_step=0, total_steps=2)
    ratios = [[0.0, 0.25] + [0.0] * (num_ranks - 2), [0.0, 0.75] + [0.0] * (num_ranks - 2)]
    recorder.epoch(epoch=0, step=1, numbers={"loss": 1.0}, ratios=ratios)
    recorder.close({})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["ratio_rank1"] == 0.5
    assert len([key for key in line if key.startswith("ratio_rank")]) == num_shown
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("epoch/ratio_rank1")] == [0.5]


def test_an_epoch_without_logged_steps_has_no_ratios(tmp_path: Path) -> None:
    recorder = Recorder(RunConfig(output=OutputConfig(folder=str(tmp_path))), from_epoch=0, from_step=0, total_steps=2)
    recorder.epoch(epoch=0, step=1, numbers={"loss": 1.0}, ratios=[])
    recorder.close({})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()).keys() == {"kind", "epoch", "step", "loss", "ratios"}


class LeavingHost(host.Host):
    """Nothing but process groups to leave."""

    forward = backward = step = save = load = None  # type: ignore[assignment]


def test_ranks_leave_together(run_ranks) -> None:
    def leave(rank, group):
        time.sleep(0.5 * rank)
        began = time.perf_counter()
        LeavingHost().close()
        return time.perf_counter() - began, torch.distributed.is_initialized()

    (first_s, is_in), (_, _) = run_ranks(leave, 2, timeout_s=60)
    assert first_s > 0.4
    assert not is_in


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_rank_that_does_not_come_is_not_waited_for(run_ranks, monkeypatch: pytest.MonkeyPatch, is_dead: bool) -> None:
    monkeypatch.setattr(host, "LEAVE_TOGETHER_S", 1.0)

    def leave(rank, group):
        torch.distributed.barrier()
        if rank == 1:
            if is_dead:
                torch.distributed.destroy_process_group()
            return 0.0
        began = time.perf_counter()
        LeavingHost().close()
        return time.perf_counter() - began

    assert run_ranks(leave, 2, timeout_s=30)[0] < 10


@pytest.mark.colossalai
def test_the_missing_4_bit_kernel_is_not_warned_of(colossalai_module) -> None:
    import logging

    import vit_examples.host_colossalai  # noqa: F401

    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.ERROR
