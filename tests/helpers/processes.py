"""Runs a function in several real processes, one a rank, and brings back what it returns.

The processes are forked: ``fn`` may be a nested function or a closure, and what the parent has imported (torch,
Colossal-AI) is there at once. For CPU only, since CUDA does not survive a fork.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported here once instead of in every rank, where it takes seconds
import torch.distributed as dist

#: Seconds that the other ranks have to report a failure of their own once one has failed.
GRACE_S = 0.5


class RankFailure(AssertionError):
    """A rank raised, died or did not end in time; the text holds that rank's own traceback."""


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float, scratch: Path) -> list[Any]:
    """``[fn(0, group, *args), fn(1, group, *args), ...]``, each computed in a process of its own.

    ``group`` is the default group of all ranks (gloo). Results are pickled; ``scratch`` is an empty folder.

    Raises:
        RankFailure: soon after one rank raises or dies, or when one still runs after ``timeout_s`` seconds. The other
            ranks are killed, with all processes that they started.
    """
    __tracebackhide__ = True
    fork = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            receiver, sender = fork.Pipe(duplex=False)
            pipes.append(receiver)
            process = fork.Process(target=_rank_main, args=(fn, rank, num_ranks, args, timeout_s, scratch, sender))
            process.start()
            processes.append(process)
            sender.close()  # the rank now holds the only end, so its death is seen as the end of the pipe
        return _collect(processes, pipes, timeout_s, scratch)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _rank_main(fn, rank, num_ranks, args, timeout_s, scratch, pipe) -> None:
    os.setpgid(0, 0)  # a group of its own, to be killed with all that it starts
    gc.freeze()  # a collection that looked at what the parent has imported would copy all of its memory
    stack_file = _stack_path(scratch, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    try:
        torch.set_num_threads(1)
        # Longer than the parent waits: it reports a hanging collective, with every rank's stack.
        timeout = timedelta(seconds=timeout_s + 10)
        store = f"file://{scratch}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
        outcome = pickle.dumps((True, fn(rank, dist.group.WORLD, *args)))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(outcome)
    time.sleep(timeout_s)  # until the parent kills it: an early exit would break the other ranks' connections


def _collect(processes: list[ForkProcess], pipes: list[Connection], timeout_s: float, scratch: Path) -> list[Any]:
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    running = {pipe: rank for rank, pipe in enumerate(pipes)}
    while running:
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            raise RankFailure(_timeout_text(processes, sorted(running.values()), timeout_s, scratch))
        for pipe in ready:
            rank = running.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                succeeded, value = False, f"the process died with exit code {processes[rank].exitcode}"
            (results if succeeded else failures)[rank] = value
            if not succeeded:  # it may have lost its connection to the one that failed first: hear that one too
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise RankFailure("\n".join(f"rank {r} of {len(pipes)} failed:\n{text}" for r, text in failures.items()))
    return [results[rank] for rank in range(len(pipes))]


def _timeout_text(processes: list[ForkProcess], ranks: list[int], timeout_s: float, scratch: Path) -> str:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)  # for the stacks to be written
    stacks = [f"rank {rank}:\n{_stack_path(scratch, rank).read_text()}" for rank in ranks]
    return "\n".join([f"still running after {timeout_s} s: ranks {ranks} of {len(processes)}", *stacks])


def _stack_path(scratch: Path, rank: int) -> Path:
    return scratch / f"stack_{rank}.txt"
