"""The ranks of a command: those that it starts on this machine, and those that torchrun or SLURM has started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from zeroresize.commands.errors import CommandError
from zeroresize.utils.deadline import within
from zeroresize.utils.texts import named_ranks

#: For so long ranks wait for each other.
LIMIT = timedelta(seconds=60)
#: Beyond it, for the store to answer; and for ranks that fail as another one has.
_GRACE = timedelta(seconds=1)


@dataclass
class Member:
    """A rank of a job, with the store where all of its ranks meet, which can tell who did not come.

    Attributes:
        nodes: [R] names of the ranks' machines, once they have met for these.
    """

    rank: int
    num_ranks: int
    local_rank: int
    store: Any
    nodes: Sequence[str] = ()

    def meet(self, where: str, text: str) -> list[str]:
        """Leave a text, and return those of all ranks; ``where`` names this meeting, and is used once.

        Raises:
            CommandError: naming the ranks that did not come within :data:`LIMIT`.
        """
        keys = [f"{where}/{rank}" for rank in range(self.num_ranks)]

        def exchange() -> list[str]:
            self.store.set(keys[self.rank], text)
            self.store.wait(keys, LIMIT)
            return [self.store.get(key).decode() for key in keys]

        try:
            return within(LIMIT + _GRACE, exchange)
        except Exception as error:
            missing = [0]  # which usually keeps the store, where that does not answer
            with suppress(Exception):
                missing = within(_GRACE, lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])])
            nodes = f" (on {', '.join(sorted({self.nodes[rank] for rank in missing}))})" if self.nodes else ""
            raise CommandError(
                f"{named_ranks(missing)} of {self.num_ranks}{nodes} did not come to {where} within "
                f"{LIMIT.total_seconds():g} s: look there for an error, and whether all ranks were started"
            ) from error

    def part(self) -> None:
        """Let the first rank, which may keep the store, stay until the others have read."""
        with suppress(Exception):
            within(_GRACE, lambda: self.store.set(f"parted/{self.rank}", ""))
            if self.rank == 0:
                within(2 * _GRACE, lambda: self.store.wait([f"parted/{r}" for r in range(self.num_ranks)], _GRACE))


def member_of_job() -> Member | None:
    """Return this process's place in a job that torchrun or SLURM has started; None where neither has.

    Raises:
        CommandError: for variables of theirs that lack or are no numbers, or a store that cannot be reached.
    """
    is_slurm = "RANK" not in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1"
    if "RANK" not in os.environ and not is_slurm:
        return None
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if is_slurm else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, num_ranks, local_rank = map(_number, names)
    address = os.environ.get("MASTER_ADDR") or (_first_node() if is_slurm else "127.0.0.1")
    by_job = is_slurm and "MASTER_PORT" not in os.environ  # a port for each job
    port = 20_000 + _number("SLURM_JOB_ID") % 20_000 if by_job else _number("MASTER_PORT")
    from torch.distributed import TCPStore  # after all that needs no torch

    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(address, port, is_master=keeps, wait_for_workers=False, timeout=LIMIT)
    except RuntimeError as error:
        raise CommandError(
            f"rank {rank}: rank 0's store does not answer at {address}:{port} within {LIMIT.total_seconds():g} s: look "
            f"whether rank 0 was started, and is there ({str(error).partition(chr(10))[0]})"
        ) from error
    return Member(rank, num_ranks, local_rank, store)


class StartedRanks:
    """Ranks of this machine, each a process, which end with a ``with`` block; they connect over loopback alone.

    Args:
        work: a function of a module, called in each as ``work(member, send, *arguments)``; ``send`` brings what can be
            pickled to :meth:`received`.
    """

    def __init__(self, work: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zeroresize_ranks_")
        self._running: dict[Connection, multiprocessing.process.BaseProcess] = {}
        context = multiprocessing.get_context("spawn")
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ranks inherit it: Ctrl-C is for this process alone
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                of_rank = (work, rank, num_ranks, f"{self._folder.name}/store", sender, arguments)
                process = context.Process(target=_run_rank, args=of_rank, name=f"rank {rank}", daemon=True)
                process.start()
                sender.close()  # the rank has the only end: its death ends the pipe
                self._running[receiver] = process
        finally:
            signal.signal(signal.SIGINT, handler)
        self._processes = list(self._running.values())

    def __enter__(self) -> StartedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    @property
    def have_ended(self) -> bool:
        return not self._running

    def received(self, seconds: float) -> list[Any]:
        """Return what ranks have sent, as soon as there is any, or nothing after so many seconds.

        Raises:
            CommandError: naming a rank that has failed, and how.
        """
        sent = []
        for pipe in wait(list(self._running), seconds):
            assert isinstance(pipe, Connection)
            try:
                sent.append(pipe.recv())
            except EOFError:
                self._running.pop(pipe).join()
        error = next((each for each in sent if isinstance(each, CommandError)), None)
        if error is not None or any(process.exitcode for process in self._processes):
            for process in self._processes:  # one that was killed is why others fail
                process.join(_GRACE.total_seconds())
            status, name = min((process.exitcode or 0, process.name) for process in self._processes)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed before it began"
            raise CommandError(f"{name} {how}") if status < 0 or error is None else error
        return sent


def _run_rank(
    work: Callable[..., None], rank: int, num_ranks: int, store: str, pipe: Connection, arguments: Sequence[Any]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    try:
        from torch.distributed import FileStore

        work(Member(rank, num_ranks, rank, FileStore(store, num_ranks)), pipe.send, *arguments)
    except Exception as error:
        kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
        pipe.send(CommandError(f"rank {rank} failed: {kind}{str(error).partition(chr(10))[0]}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _number(name: str) -> int:
    text = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
    if not text.isdecimal():
        raise CommandError(f"{name}={text!r} is in the environment: a whole number is needed")
    return int(text)


def _first_node() -> str:
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise CommandError(f"{' '.join(command)!r} names no machine: set MASTER_ADDR to that of rank 0") from error
