"""Starts the ranks of a node, as torchrun does, from the command line or a program; nothing listens beyond the machine.

    python -m vit_examples.one_node --nproc-per-node 2 -m vit_examples.train --config demo

torchrun's stores listen on all interfaces, and gloo and NCCL on the one that the host's name leads to: on a shared
network anybody could write into them. Here all of them listen on the loopback interface. Ctrl-C, or a rank that fails,
ends the ranks without a traceback or a table of the launcher's own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
#: Seconds that ranks have to end once they are told to.
GRACE_S = 30.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_USAGE_ERROR = 2  # whoever ends with it has said why


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: of the first rank that fails, or 128 + the signal that ended it."""
    parser = argparse.ArgumentParser(prog="vit_examples.one_node", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="RANKS", help="processes to start")
    parser.add_argument("-m", action="store_true", dest="is_module", help="TARGET is a module, as in python -m")
    parser.add_argument("target", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node}: at least 1 is needed")
    target = [*(["-m"] if options.is_module else []), options.target, *options.args]
    return run([sys.executable, "-u", *target], options.nproc_per_node)


def run(command: Sequence[str], num_ranks: int) -> int:
    """Run ``command`` once a rank until all have ended, or one has failed and the others were stopped."""
    signals: list[int] = []

    def pass_on(signal_number: int, frame: FrameType | None) -> None:
        signals.append(signal_number)

    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(signal_number, pass_on)
    store = loopback_store()
    ranks = [
        subprocess.Popen(
            command,
            env=rank_environment(rank, num_ranks, store.port),
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        for rank in range(num_ranks)
    ]
    while not signals:
        statuses = [rank.poll() for rank in ranks]
        failed = {number: status for number, status in enumerate(statuses) if status}
        if failed:
            stop(ranks, signal.SIGTERM)
            return told_status(failed)
        if None not in statuses:
            return 0
        time.sleep(_POLL_S)
    stop(ranks, signals[0])
    return 128 + signals[0]


def loopback_store() -> TCPStore:
    """The ranks' store. A TCPStore that chooses its port itself listens on all interfaces."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables of this process and what torchrun sets for a rank; those of gloo and NCCL only where unset."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks find the store at that port, instead of making one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "one-node",
    }


def stop(ranks: Sequence[subprocess.Popen[bytes]], signal_number: int) -> None:
    """Tell those that still run to end, and wait; kill what has not ended after ``GRACE_S`` seconds."""
    for rank in ranks:
        rank.send_signal(signal_number)
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def told_status(failed: Mapping[int, int]) -> int:
    """The exit status for the first ranks that failed, whose own are given; says which they are."""
    for rank, status in failed.items():
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status != _USAGE_ERROR:
            sys.stderr.write(f"rank {rank} {how}\n")
    status = next(iter(failed.values()))
    return 128 - status if status < 0 else status


def train_command(config: str, overrides: Sequence[str], num_ranks: int) -> list[str]:
    """``vit_examples.train`` on ``num_ranks`` ranks of this machine, with overrides such as ``training.epochs=3``."""
    command = [sys.executable, "-m", "vit_examples.one_node", f"--nproc-per-node={num_ranks}"]
    return [*command, *train_options(config, overrides)]


def train_options(config: str, overrides: Sequence[str]) -> list[str]:
    """What a launcher runs: ``vit_examples.train`` with overrides such as ``training.epochs=3``."""
    return ["-m", "vit_examples.train", "--config", config, *(f"--set={override}" for override in overrides)]


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


if __name__ == "__main__":
    sys.exit(main())
