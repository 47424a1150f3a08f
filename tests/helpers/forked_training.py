"""Two ranks of a training program as forks of this process, whose imports they inherit: each would take seconds.

They get what torchrun gives its ranks. How real launchers start, stop and report ranks is for tests that start those.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch._dynamo  # optimizers need it

from vit_examples import train
from vit_examples.one_node import loopback_store, rank_environment

NUM_RANKS = 2
_FORK = multiprocessing.get_context("fork")


class ForkedTraining:
    """Ranks that run, and what they have said; made by :func:`training_started`."""

    def __init__(self, ranks: list[ForkProcess], folder: Path):
        self._ranks, self._folder = ranks, folder

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """The first status that is not 0, and all that was said; the other ranks are stopped then, as by torchrun.

        Raises:
            TimeoutError: if ranks still run after so many seconds; it says what they have said.
        """
        deadline = time.monotonic() + timeout_s
        running = {rank.sentinel: rank for rank in self._ranks}
        status = 0
        while running and not status:
            ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeoutError(f"still running after {timeout_s} s: {self.said()}")
            for sentinel in ended:
                rank = running.pop(sentinel)
                rank.join()
                status = status or rank.exitcode
        stop(self._ranks)
        stdout, stderr = self.said()
        return subprocess.CompletedProcess(["training"], status, stdout, stderr)

    def said(self) -> tuple[str, str]:
        """What is on the ranks' standard output and standard error so far."""
        return (self._folder / "stdout").read_text(), (self._folder / "stderr").read_text()


@contextmanager
def training_started(
    arguments: Sequence[str],
    folder: Path,
    before: Callable[[], None] = lambda: None,
    main: Callable[[Sequence[str]], None] = train.main,
) -> Iterator[ForkedTraining]:
    """While such a block lasts; each rank calls ``before()``, then ``main(arguments)``."""
    folder.mkdir(parents=True)
    here, there = _FORK.Pipe()
    store = _FORK.Process(target=_keep_store, args=(there,))
    store.start()
    ranks: list[ForkProcess] = []
    try:
        port = here.recv()
        for rank in range(NUM_RANKS):
            environment = rank_environment(rank, NUM_RANKS, port)
            ranks.append(_FORK.Process(target=_rank_main, args=(arguments, environment, folder, before, main)))
            ranks[-1].start()
        yield ForkedTraining(ranks, folder)
    finally:
        stop(ranks)
        store.kill()
        store.join()


def forked_training(
    arguments: Sequence[str],
    folder: Path,
    before: Callable[[], None] = lambda: None,
    main: Callable[[Sequence[str]], None] = train.main,
) -> subprocess.CompletedProcess[str]:
    """What a training ends with and says."""
    with training_started(arguments, folder, before, main) as training:
        return training.wait(100.0)


def stop(ranks: Sequence[ForkProcess]) -> None:
    """Nothing is left of them."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
        rank.join()


def _keep_store(pipe: Connection) -> None:
    store = loopback_store()
    pipe.send(store.port)
    time.sleep(300.0)  # until it is killed; not for ever, should the test process be killed itself


def _rank_main(
    arguments: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    before: Callable[[], None],
    main: Callable[[Sequence[str]], None],
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    logging.getLogger().handlers.clear()  # pytest's: without any, warnings go to standard error
    torch.set_num_threads(1)
    before()
    main(arguments)
