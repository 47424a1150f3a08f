"""What a run shows and records on rank 0, and how ranks leave together."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from helpers.faults import files_of_at_most
from rich.console import Console

pytest.importorskip("tensorboard")

from vit_examples import host, recorder
from vit_examples.balance_log import BalanceLog
from vit_examples.config import OutputConfig, RunConfig, TrainingConfig
from vit_examples.harness import all_ranks
from vit_examples.recorder import Recorder, commit_of_code
from zeroresize.utils.json_lines import read_json_lines

MANY = [0.5, 0.25, *[0.0] * 6]


def recorder_in(
    folder: Path, from_epoch: int = 0, *, console: Console | None = None, is_shown: bool = True
) -> Recorder:
    """The recorder of a run of 8 steps on two ranks, 4 steps an epoch."""
    config = RunConfig(host="torch", output=OutputConfig(folder=str(folder), progress=is_shown))
    return Recorder(
        config, num_ranks=2, from_epoch=from_epoch, from_step=4 * from_epoch, total_steps=8, console=console
    )


@pytest.mark.parametrize(
    ("ratios", "slow", "end"),
    [
        ([0.0, 0.5], [1], "work 1.00 0.50, slow 1"),
        ([-0.62, 0.62], [1], "work 1.62 0.38, slow 1"),
        ([0.0] * 3 + [0.9] + [0.0] * 60, [3], "work 0.10 on 3, slow 3"),
        (MANY, list(range(8)), "work 0.50–1.00, slow 8 ranks"),
        ([0.75, *[-0.25] * 3], [0], "work 0.25–1.25, slow 0"),
        ([0.0] * 8, [], "work 1.00, slow –"),
        ([], [], "work –, slow –"),
    ],
)
def test_a_log_file_gets_one_short_line_an_epoch(
    tmp_path: Path, ratios: list[float], slow: list[int], end: str
) -> None:
    stream = io.StringIO()
    with recorder_in(tmp_path, console=Console(file=stream)) as written:
        written.step("epoch 1")
        written.show_epoch(150, 2.3456, 12345.0, 1.0, ratios, slow)
    said = stream.getvalue()
    assert said == f"torch, 2 ranks, balance off\nepoch 150: loss 2.346, 12345 ms/step, acc. 100.0%, {end}\n"
    assert max(map(len, said.splitlines())) <= 80


def test_a_row_of_a_terminals_table_fits_80_columns(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with recorder_in(tmp_path, console=console) as written:
        written.step("epoch 150")
        written.show_epoch(150, 2.3456, 12345.0, 1.0, MANY, list(range(8)))
    assert "│   150 │ 2.346 │   12345 │        100.0% │ 0.50–1.00 │    8 ranks │" in stream.getvalue()
    assert "torch, 2 ranks, balance off" in stream.getvalue()
    assert re.search(r"^epoch 150 .* 1/8 ", stream.getvalue(), re.M)


def test_a_display_that_is_off_says_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    with recorder_in(tmp_path, console=Console(file=stream), is_shown=False) as written:
        written.step("epoch 1")
        written.show_epoch(1, 1.0, 1.0, 1.0, [0.0], [])
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("num_ranks", "num_shown"), [(2, 2), (20, 16)])
def test_an_epoch_records_the_mean_ratio_of_each_rank(tmp_path: Path, num_ranks: int, num_shown: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig(output=OutputConfig(folder=str(tmp_path)))
    written = Recorder(config, num_ranks=2, from_epoch=0, from_step=0, total_steps=2)
    ratios = [[0.0, 0.25] + [0.0] * (num_ranks - 2), [0.0, 0.75] + [0.0] * (num_ranks - 2)]
    written.epoch(epoch=0, step=1, numbers={"loss": 1.0}, ratios=ratios)
    written.close({})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["ratio_rank1"] == 0.5
    assert len([key for key in line if key.startswith("ratio_rank")]) == num_shown
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("epoch/ratio_rank1")] == [0.5]


def test_an_epoch_without_logged_steps_has_no_ratios(tmp_path: Path) -> None:
    written = Recorder(
        RunConfig(output=OutputConfig(folder=str(tmp_path))), num_ranks=2, from_epoch=0, from_step=0, total_steps=2
    )
    written.epoch(epoch=0, step=1, numbers={"loss": 1.0}, ratios=[])
    written.close({})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"kind": "epoch", "epoch": 0, "step": 1, "from_step": 0, "loss": 1.0, "ratios": []}


def test_a_summary_tells_the_commit_that_the_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "commit_of_code", lambda: "abc1234")
    written = Recorder(
        RunConfig(output=OutputConfig(folder=str(tmp_path))), num_ranks=2, from_epoch=0, from_step=0, total_steps=2
    )
    monkeypatch.setattr(recorder, "commit_of_code", lambda: "def5678")
    written.close({"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text())["commit"] == "abc1234"


@pytest.mark.parametrize(("before", "expected"), [(["abc1234"], "abc1234 def5678"), (["def5678"], "def5678")])
def test_a_run_that_was_resumed_tells_the_commits_of_all_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], expected: str
) -> None:
    monkeypatch.setattr(recorder, "commit_of_code", lambda: "def5678")
    config = RunConfig(output=OutputConfig(folder=str(tmp_path)))
    Recorder(config, num_ranks=2, from_epoch=1, from_step=2, total_steps=4, commits=before).close({})
    assert json.loads((tmp_path / "summary.json").read_text())["commit"] == expected


@pytest.mark.parametrize(("from_epoch", "stays"), [(0, False), (2, False), (3, True)])
def test_a_run_that_goes_on_has_no_summary_of_before_and_one_that_is_finished_keeps_it(
    tmp_path: Path, from_epoch: int, stays: bool
) -> None:
    config = RunConfig(output=OutputConfig(folder=str(tmp_path)), training=TrainingConfig(epochs=3))
    (tmp_path / "summary.json").write_text("{}")
    Recorder(config, num_ranks=2, from_epoch=from_epoch, from_step=from_epoch, total_steps=3)
    assert (tmp_path / "summary.json").exists() == stays


# ---- a disk that is full, files of others ---------------------------------------------------------------------------


def test_numbers_that_cannot_be_written_end_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = recorder_in(tmp_path)
    with files_of_at_most(0):
        for step in range(3):
            written.metrics(epoch=0, step=step, loss=torch.tensor(1.0), lr=0.1, step_s=1.0, balance={})
        written.epoch(epoch=0, step=2, numbers={"loss": 1.0}, ratios=[])
    written.epoch(epoch=1, step=3, numbers={"loss": 1.0}, ratios=[])
    written.close({"steps": 3})
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [3]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    assert len(caplog.messages) == 2
    assert f"{tmp_path}/metrics.jsonl is incomplete from step 0 on: " in caplog.text
    assert f"TensorBoard's {tmp_path}/tensorboard is incomplete from step 0 on: " in caplog.text


def test_lines_that_cannot_be_shown_end_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w") as full:
        with recorder_in(tmp_path, console=Console(file=full)) as written:
            written.show_epoch(1, 1.0, 1.0, 1.0, [0.0], [])
        with suppress(OSError):
            full.close()
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("what is shown of this run is incomplete")


def test_a_summary_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    written = recorder_in(tmp_path)
    with files_of_at_most(0), pytest.raises(OSError, match=f"{tmp_path}/summary.json: cannot be written: "):
        written.close({"steps": 3})
    assert not list(tmp_path.glob("*summary.json"))


def test_columns_that_cannot_be_written_stay_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = BalanceLog(tmp_path, 0, from_step=0)
    balancer: Any = SimpleNamespace(pruned_steps=lambda: {"up": numpy.arange(100)})
    log.epoch(balancer)
    balancer.pruned_steps = lambda: {"up": numpy.arange(100) ** 2}
    with files_of_at_most(100):
        log.epoch(balancer)
        log.epoch(balancer)
    assert numpy.load(tmp_path / "columns-rank0.npz")["up"].tolist() == list(range(100))
    assert len(caplog.messages) == 1 and not list(tmp_path.glob("unfinished*"))
    log.epoch(balancer)
    assert numpy.load(tmp_path / "columns-rank0.npz")["up"][-1] == 99**2
    log.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "config.json"])
def test_an_output_that_cannot_be_made_is_told_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch() if name == "tensorboard" else (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"output.folder={tmp_path}: cannot be written to: .*{name}"):
        recorder_in(tmp_path)


def test_a_line_without_an_epoch_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n{"step": 5}\n')
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl, line 2: expected a number 'epoch': delete the line, or move"
    ):
        recorder_in(tmp_path, from_epoch=1)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    command = ("git", *identity, *arguments)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_code_and_dirty_where_the_code_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "ROOT", tmp_path)
    for package in ("vit_examples", "zeroresize"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "code.py").write_text("1")
    assert commit_of_code() == ""  # no checkout
    git(tmp_path, "init", "--quiet")
    (tmp_path / "results.csv").write_text("1")
    git(tmp_path, "add", "results.csv")
    git(tmp_path, "commit", "--quiet", "-m", "something else")
    assert commit_of_code() == ""  # a checkout of something else, in which the code lies
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "code")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "results.csv").write_text("2")  # what studies write is no code
    assert commit_of_code() == commit
    (tmp_path / "zeroresize" / "new.py").write_text("1")
    assert commit_of_code() == f"{commit}-dirty"
    (tmp_path / "zeroresize" / "new.py").unlink()
    (tmp_path / "vit_examples" / "code.py").write_text("2")
    assert commit_of_code() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    assert commit_of_code() == ""


class LeavingHost(host.Host):
    """Nothing but process groups to leave."""

    join = forward = backward = step = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


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
    monkeypatch.setattr(all_ranks, "LEAVE_TOGETHER_S", 1.0)

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


def test_a_file_of_columns_is_never_seen_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there while it is being written is not taken for it."""
    seen: list[Path] = []
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> None:
        write_bytes(path, content[: len(content) // 2])
        seen.extend(tmp_path.glob("columns-rank*.npz"))
        write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    log = BalanceLog(tmp_path, 0, from_step=0)
    log.epoch(SimpleNamespace(pruned_steps=lambda: {"up": numpy.arange(3)}))
    log.close()
    assert seen == []
    assert numpy.load(tmp_path / "columns-rank0.npz")["up"].tolist() == [0, 1, 2]
