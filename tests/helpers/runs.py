"""Runs of a few seconds, pictures drawn at random, and tables of studies."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from vit_examples.train import main
from zeroresize.utils.files import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_NODE = [sys.executable, "-m", "vit_examples.one_node", "--nproc-per-node=2"]


def long_run(pictures: Path, output: Path, *overrides: str) -> list[str]:
    """The module and arguments of a training that goes on for minutes, of steps of milliseconds."""
    settings = [
        "host=torch",
        "model={hidden_size: 32, depth: 1, num_heads: 2, patch_size: 8}",
        "data={train_size: null, test_size: null}",
        "training={epochs: 10000, batch_size: 8}",
        f"output={{folder: '{output}', log_every: 1, save_every: 1}}",
        *overrides,
    ]
    sets = [f"--set={setting}" for setting in settings]
    return ["-m", "vit_examples.train", "--config=demo", *sets, f"--set=data.source={pictures}"]


def launched(*command: str, seconds: float = 90.0) -> subprocess.CompletedProcess[str]:
    """What a command ends with and says."""
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False)


def interrupted(command: list[str], metrics: Path, num_epochs: int) -> tuple[int, list[str]]:
    """The status and lines of a training that Ctrl-C ends after so many epochs: all its processes get the signal."""
    process = subprocess.Popen(
        command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        wait_for_epochs(metrics, num_epochs, process)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.splitlines()


def wait_for_epochs(metrics: Path, number: int, process: subprocess.Popen) -> None:
    """Until ``metrics.jsonl`` has so many epochs, and a step more."""
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline and process.poll() is None:
        kinds = [line["kind"] for line in read_json_lines(metrics)]
        if kinds.count("epoch") >= number and kinds[-1:] == ["step"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"{metrics} never got {number} epochs")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``main`` says when it refuses ``arguments``."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def write_parquet(path: Path, size: int, *, image: str = "img", side: int = 32) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    cells = []
    for picture in pictures:
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, format="PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    pyarrow.parquet.write_table(pyarrow.table({image: cells, "label": [n % 10 for n in range(size)]}), path)


def written(table: Path) -> list[tuple[str, str]]:
    """(cell, seed) of each row."""
    with table.open(newline="") as stream:
        return [(row["cell"], row["seed"]) for row in csv.DictReader(stream)]
