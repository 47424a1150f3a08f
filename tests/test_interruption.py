"""Ctrl-C in a training, as a terminal sends it: to every process at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from test_vit_data import write_parquet
from training_runs import ONE_NODE, TORCHRUN, interrupted, long_run

from vit_examples.checkpoint import newest_checkpoint
from vit_examples.config_file import load_config
from vit_examples.interruption import how_to_go_on


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_parquet(folder / "train.parquet", 320)
    write_parquet(folder / "test.parquet", 10)
    return folder


@pytest.mark.timeout(200)
def test_ctrl_c_says_in_one_line_how_to_go_on_and_ends_with_130(pictures: Path, tmp_path: Path) -> None:
    command = [*ONE_NODE, *long_run(pictures, tmp_path, "output.progress=false")]
    status, lines = interrupted(command, tmp_path / "metrics.jsonl", num_epochs=2)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    epoch = int(newest.name[-4:])
    assert status == 130
    assert lines[-1] == (
        f"interrupted: the same command with --resume goes on after epoch {epoch} of 10000, from {newest}"
    )
    assert len([line for line in lines if not re.match("convert: |pre-test", line)]) == 1, lines


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


def test_what_is_said_follows_from_the_folder(tmp_path: Path) -> None:
    config = load_config("demo", [f"output.folder={tmp_path}", "output.save_every=2", "training.epochs=7"])
    assert "no checkpoint is written yet (the first comes after epoch 2)" in how_to_go_on(config)
    for epoch in (2, 4):
        (tmp_path / "checkpoints" / f"epoch-{epoch:04d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "epoch-0006.tmp").mkdir()
    assert f"goes on after epoch 4 of 7, from {tmp_path}/checkpoints/epoch-0004" in how_to_go_on(config)
