"""Runs of a few seconds, folders of runs that never ran, pictures drawn at random, and tables of studies."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from vit_examples.train import main
from zeroresize.telemetry import JsonLinesTelemetry, UpdateRecord
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


LAYERS = ("fc1", "fc2")


def record(rank: int, update: int, ratio: float, **changes: Any) -> UpdateRecord:
    """One of an update every ten steps, at which ``ratio`` is pruned from now on; the first has measured nothing."""
    values = {
        "update": update,
        "step": 10 * update,
        "epoch": 0,
        "rank": rank,
        "busy_s": float("nan") if update == 1 else 0.2,
        "gemm_s": float("nan") if update == 1 else 0.1,
        "is_straggler": ratio > 0,
        "ratio": ratio,
        "pruned": ratio,
        "lent": 0.0,
        "borrowed": 0.0,
        "owned": 1.0,
        "units": {},
        "lent_to": {},
        "layer_shares": dict.fromkeys(LAYERS, ratio),
        "predicted_step_s": 0.2,
        "calibration_steps": 0,
        "balancing_since_update_s": 0.05,
    }
    return UpdateRecord(**{**values, **changes})


def write_records(folder: Path, rank: int, records: Sequence[UpdateRecord]) -> None:
    write = JsonLinesTelemetry(folder / f"balance-rank{rank}.jsonl")
    for record in records:
        write(record)
    write.close()


def write_metrics(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    mode: str,
    seconds: Sequence[float],
    slow: Sequence[UpdateRecord] = (),
    *,
    summary: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """A run of two ranks in one epoch; the records of rank 1 are ``slow``, rank 0 does nothing but train."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [{"kind": "step", "step": step, "from_step": 0, "step_s": step_s} for step, step_s in enumerate(seconds)]
    write_metrics(folder, [*steps, {"kind": "epoch", "epoch": 0, "step": len(seconds) - 1, "ratios": []}])
    slow = slow or [record(1, update, 0.0, busy_s=0.4) for update in range(1, len(seconds) // 10 + 1)]
    write_records(folder, 0, [record(0, one.update, 0.0, busy_s=0.1) for one in slow])
    write_records(folder, 1, slow)
    config = {"balance": {"mode": mode}, "output": {"settle_steps": 5}, **sections}
    (folder / "config.json").write_text(json.dumps({**config, "total_steps": len(seconds)}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({**summary, "config": config}))
    return folder


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
