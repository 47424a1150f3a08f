"""Ctrl-C in a training, as a terminal sends it: to every process at once."""

from __future__ import annotations

import re
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from helpers.runs import ONE_NODE, ROOT, TORCHRUN, interrupted, long_run, write_parquet

from vit_examples.checkpoint import EPOCHS
from vit_examples.config_file import load_config
from vit_examples.harness.interruption import ended_by_interrupt, how_to_go_on


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_parquet(folder / "train.parquet", 320)
    write_parquet(folder / "test.parquet", 10)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ctrl_c_says_in_one_line_how_to_go_on_and_ends_with_130(pictures: Path, tmp_path: Path) -> None:
    command = [*ONE_NODE, *long_run(pictures, tmp_path, "output.progress=false")]
    status, lines = interrupted(command, tmp_path / "metrics.jsonl", num_epochs=2)
    newest = EPOCHS.newest(tmp_path / "checkpoints")
    epoch = int(newest.name[-4:])
    assert status == 130
    assert lines[-1] == (
        f"interrupted: the same command with --resume goes on after epoch {epoch} of 10000, from {newest}"
    )
    lines_of_training = r"convert: |measured once, |step \d+: (ranks come late|rank \d+ is )"
    assert len([line for line in lines if not re.match(lines_of_training, line)]) == 1, lines


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_under_torchrun_the_ranks_add_one_line_to_its_own_traceback(pictures: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, *long_run(pictures, tmp_path, "output.progress=false", "output.save_every=0")]
    _, lines = interrupted(command, tmp_path / "metrics.jsonl", num_epochs=0)
    said = [line for line in lines if line.startswith("interrupted: ")]
    assert said == [
        "interrupted: no checkpoint is written yet (output.save_every=0 writes none); "
        "the same command with --resume begins anew"
    ]
    assert "\n".join(lines).count("Traceback") == 1
    assert lines[-1].startswith("torch.distributed.elastic.multiprocessing.api.SignalException")


@pytest.fixture
def deaf() -> Iterator[None]:
    """As a process that a shell without job control starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_is_ignored_at_the_start_stays_ignored(deaf: None) -> None:
    with ended_by_interrupt(lambda: ""):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("name", ["train", "one_node"])
def test_a_command_leaves_an_ignored_interrupt_ignored(deaf: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with suppress(SystemExit):
        runpy.run_path(str(ROOT / "vit_examples" / f"{name}.py"), run_name="__main__")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_what_is_said_follows_from_the_folder(tmp_path: Path) -> None:
    config = load_config("demo", [f"output.folder={tmp_path}", "output.save_every=2", "training.epochs=7"])
    assert "no checkpoint is written yet (the first comes after epoch 2)" in how_to_go_on(config)
    short = load_config("demo", [f"output.folder={tmp_path}", "output.save_every=500", "training.epochs=300"])
    assert "no checkpoint is written yet (output.save_every=500 writes none in 300 epochs)" in how_to_go_on(short)
    for epoch in (2, 4):
        (tmp_path / "checkpoints" / f"epoch-{epoch:04d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "epoch-0006.tmp").mkdir()
    assert f"goes on after epoch 4 of 7, from {tmp_path}/checkpoints/epoch-0004" in how_to_go_on(config)
