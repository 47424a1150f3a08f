"""The program on real ranks of this machine, and an interrupt of one that was started as users do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import forked_training

from lm_examples import train
from zeroresize.utils.json_lines import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def small(folder):
    sizes = "model={num_blocks: 4, hidden_size: 8, num_heads: 2, context: 8}"
    return [f"--output={folder}", f"--data={ROOT / 'lm_examples'}", f"--set={sizes}"]


@pytest.mark.slow
def test_it_trains_resumes_on_other_stages_and_refuses_to_overwrite(tmp_path):
    output = tmp_path / "run"

    def ran(said, num_ranks, *arguments):
        return forked_training([*small(output), *arguments], tmp_path / said, main=train.main, num_ranks=num_ranks)

    ended = ran("first", 2, "--steps=4", "--set=output.save_every=2", "--set=training.log_every=1")
    assert ended.returncode == 0, ended.stderr
    assert "step 4: loss" in ended.stdout and "stage 1" in ended.stdout and "blocks 2 to 3, head" in ended.stdout
    uniform = "--set=pipeline.boundaries=uniform"
    ended = ran("resumed", 3, "--steps=6", "--resume", "--set=training.log_every=1", uniform)
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in read_json_lines(output / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["boundaries"] == [0, 2, 4, 6] and summary["tokens_per_s"] > 0
    ended = ran("again", 2, "--steps=6")
    assert ended.returncode == 2 and ended.stderr.count("holds an earlier run: add --resume") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_interrupt_ends_it_with_one_line_that_says_how_to_go_on(tmp_path):
    launcher = [sys.executable, "-m", "vit_examples.one_node", "--nproc-per-node=2", "-m", "lm_examples.train"]
    arguments = ["--steps=100000", "--set=output.save_every=1", "--set=training.log_every=1"]
    process = subprocess.Popen(
        [*launcher, *small(tmp_path), *arguments],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(read_json_lines(tmp_path / "metrics.jsonl")) < 3:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.count("interrupted: the same command with --resume goes on after step") == 1
