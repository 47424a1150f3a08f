"""Training in processes of its own, which never outlive whoever started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


def train_command(config: str, overrides: Sequence[str], num_ranks: int) -> list[str]:
    """``vit_examples.train`` on ``num_ranks`` ranks of this machine, with overrides such as ``training.epochs=3``."""
    command = [sys.executable, "-m", "vit_examples.one_node", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "vit_examples.train", "--config", config]
    return [*command, *(f"--set={override}" for override in overrides)]


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of ``command``, its output at the end of ``log``; it is stopped at the end of the block.

    On Linux also where this process is killed: the launcher is told, and ends its ranks.

    Args:
        environment: variables to set besides those of this process.
    """
    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": search_path, **(environment or {})}
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=variables,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def end_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies; for ``preexec_fn``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
