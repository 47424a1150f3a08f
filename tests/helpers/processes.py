"""Runs a function in several real processes, one a rank, and brings back what it returns.

The processes are forked: ``fn`` may be a nested function or a closure, and what the parent has imported (torch,
Colossal-AI) is there at once. CUDA does not survive a fork: ranks on GPUs are spawned (tests/gpu).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch._dynamo  # optimizers need it: imported here once instead of in every rank, where it takes seconds
import torch.distributed as dist
import torch.overrides

import zeroresize.integrations.dtensor  # noqa: F401 (as soon as a model is converted)
from vit_examples import train
from vit_examples.one_node import loopback_store, rank_environment


def _do_here_once() -> None:
    """What a process imports and looks up when it first trains: here, instead of once in every rank."""
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)  # for torch.fx
    if torch.cuda.is_available():  # autograd starts a thread for each GPU: no backward after a fork
        return
    with warnings.catch_warnings():  # they are for who uses them, not for all tests
        warnings.simplefilter("ignore")
        layer = torch.nn.Linear(2, 2)
        for optimizer in (torch.optim.AdamW(layer.parameters()), torch.optim.SGD(layer.parameters())):
            torch.nn.functional.gelu(layer(torch.ones(2, 2))).sum().backward()
            optimizer.step()


_do_here_once()

#: Seconds that the other ranks have to report a failure of their own once one has failed.
GRACE_S = 0.5


class RankFailure(AssertionError):
    """A rank raised, died or did not end in time; the text holds that rank's own traceback."""


def _join_by_gloo(**options: Any) -> None:
    dist.init_process_group("gloo", **options)


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float,
    scratch: Path,
    start_method: str = "fork",
    join: Callable[..., None] = _join_by_gloo,
) -> list[Any]:
    """``[fn(0, group, *args), fn(1, group, *args), ...]``, each computed in a process of its own.

    ``group`` is the default group of all ranks, which ``join`` makes. Results are pickled; ``scratch`` is an empty
    folder. With the start method ``spawn`` ``fn`` and ``join`` are functions of a module.

    Raises:
        RankFailure: soon after one rank raises or dies, or when one still runs after ``timeout_s`` seconds. The other
            ranks are killed, with all processes that they started.
    """
    __tracebackhide__ = True
    context = multiprocessing.get_context(start_method)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    traceback.format_stack()  # torch.manual_seed asks for it: every rank would read the same source files
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            pipes.append(receiver)
            process = context.Process(
                target=_rank_main, args=(fn, rank, num_ranks, args, timeout_s, scratch, join, sender)
            )
            process.start()
            processes.append(process)
            sender.close()  # the rank now holds the only end, so its death is seen as the end of the pipe
        return _collect(processes, pipes, timeout_s, scratch)
    finally:
        _end(processes, pipes)


def _end(processes: Iterable[BaseProcess], pipes: Iterable[Connection]) -> None:
    """With all processes that they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    for pipe in pipes:
        pipe.close()


def runner_in(folder: Path, limit_s: float = 60.0, **options: Any) -> Callable[..., list[Any]]:
    """:func:`run_ranks` with these options, each time in a new folder within ``folder``; its time limit is optional."""

    def run(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = limit_s) -> list[Any]:
        __tracebackhide__ = True
        scratch = Path(tempfile.mkdtemp(prefix="ranks_", dir=folder))
        return run_ranks(fn, num_ranks, *args, timeout_s=timeout_s, scratch=scratch, **options)

    return run


def for_each(cases: Iterable[Sequence[Any]]) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Let ``fn(rank, group, *case)`` run for one case after another in the same ranks; results are lists by case.

    An error says in which case it was raised.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        def run_cases(rank: int, group: dist.ProcessGroup) -> list[Any]:
            results = []
            for case in cases:
                torch.set_default_dtype(torch.float32)
                try:
                    results.append(fn(rank, group, *case))
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise
            return results

        return run_cases

    return decorate


class Wanted(BaseException):
    """Tells how many ranks a test wants that is called to learn it, and for how many seconds."""

    @classmethod
    def run_ranks(cls, fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> NoReturn:
        """Stand in for ``run_ranks``."""
        raise cls(num_ranks, timeout_s)


class RankPool:
    """Ranks in which tests of a module run whole, one after another: a test's ``run_ranks`` calls its function there.

    Ranks are forked when the pool is made, so they have the module and need no closures sent. What a test patches by
    ``monkeypatch`` is undone behind it; what it leaves otherwise, such as a module's attribute that it has set, stays.
    After a failure the pool is of no use any more.
    """

    def __init__(self, module: ModuleType, num_ranks: int, scratch: Path) -> None:
        self._scratch, self._processes, self._pipes = scratch, [], []
        traceback.format_stack()
        for rank in range(num_ranks):
            here, there = _FORK.Pipe()
            process = _FORK.Process(target=_pool_main, args=(module, rank, num_ranks, scratch, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, name: str, arguments: dict[str, Any], timeout_s: float = 60.0) -> None:
        """Let all ranks call the module's test with these arguments, and its ``run_ranks`` and ``monkeypatch``.

        Raises:
            RankFailure: as :func:`run_ranks`.
        """
        __tracebackhide__ = True
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it is dead, as is seen at once
                pipe.send_bytes(pickle.dumps((name, arguments)))
        _collect(self._processes, self._pipes, timeout_s, self._scratch)

    def close(self) -> None:
        """End the ranks, with all processes that they started."""
        _end(self._processes, self._pipes)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _pool_main(module: ModuleType, rank: int, num_ranks: int, scratch: Path, pipe: Connection) -> None:
    os.setpgid(0, 0)
    gc.freeze()
    parent, stack_file = os.getppid(), _stack_path(scratch, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    torch.set_num_threads(1)
    store, timeout = f"file://{scratch}/store", timedelta(seconds=180)  # longer than tests have
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)

    groups = {num_ranks: dist.group.WORLD}

    def run(fn: Callable[..., Any], number: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        assert number <= num_ranks, f"a test that is marked same_ranks wants {num_ranks} ranks first, then {number}"
        if number not in groups:
            groups[number] = dist.new_group(list(range(number)))
        results: list[Any] = [None] * num_ranks
        dist.all_gather_object(results, fn(rank, groups[number], *args) if rank < number else None)
        return results[:number]

    while True:
        while not pipe.poll(5.0):
            if os.getppid() != parent:
                os._exit(1)
        name, arguments = pickle.loads(pipe.recv_bytes())
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        try:
            test = getattr(module, name)
            with pytest.MonkeyPatch.context() as patch:
                here = {"run_ranks": run, "monkeypatch": patch}
                names = inspect.signature(test).parameters
                test(**arguments, **{key: value for key, value in here.items() if key in names})
            outcome = True, None
        except BaseException:
            outcome = False, traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps(outcome))


def in_first_rank(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``fn`` run in rank 0 of a larger group only, and return None elsewhere.

    It is for what sends nothing to other ranks and is the same on all of them: one rank shows it in half the time.
    """

    @functools.wraps(fn)
    def first_only(rank: int, group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        return fn(rank, group, *args, **options) if rank == 0 else None

    return first_only


def _rank_main(fn, rank, num_ranks, args, timeout_s, scratch, join, pipe) -> None:
    os.setpgid(0, 0)  # a group of its own, to be killed with all that it starts
    gc.freeze()  # a collection that looked at what the parent has imported would copy all of its memory
    stack_file = _stack_path(scratch, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    try:
        torch.set_num_threads(1)
        # Longer than the parent waits: it reports a hanging collective, with every rank's stack.
        timeout = timedelta(seconds=timeout_s + 10)
        join(init_method=f"file://{scratch}/store", rank=rank, world_size=num_ranks, timeout=timeout)
        outcome = pickle.dumps((True, fn(rank, dist.group.WORLD, *args)))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(outcome)
    time.sleep(timeout_s)  # until the parent kills it: an early exit would break the other ranks' connections


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout_s: float, scratch: Path) -> list[Any]:
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


def _timeout_text(processes: list[BaseProcess], ranks: list[int], timeout_s: float, scratch: Path) -> str:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)  # for the stacks to be written
    stacks = [f"rank {rank}:\n{_stack_path(scratch, rank).read_text()}" for rank in ranks]
    return "\n".join([f"still running after {timeout_s} s: ranks {ranks} of {len(processes)}", *stacks])


def _stack_path(scratch: Path, rank: int) -> Path:
    return scratch / f"stack_{rank}.txt"


def told_by_survivors(fn, num_ranks, folder, stopped=()):
    """What ``fn(rank, group)`` returns, by rank, on those ranks whose process it does not end.

    Args:
        stopped: ranks whose processes stop and are not waited for.
    """
    fork = multiprocessing.get_context("fork")

    def main(rank):
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        try:
            result = fn(rank, dist.group.WORLD)
        except BaseException:
            result = traceback.format_exc()
        (folder / f"{rank}.writing").write_text(result)
        (folder / f"{rank}.writing").rename(folder / f"{rank}.told")
        time.sleep(60.0)  # until it is killed: ending would break connections

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 40.0
    try:
        while time.monotonic() < deadline:
            results = {int(path.stem): path.read_text() for path in folder.glob("*.told")}
            if all(not process.is_alive() or rank in results or rank in stopped for rank, process in enumerate(ranks)):
                return results
            time.sleep(0.05)
        raise TimeoutError(f"only ranks {sorted(results)} have ended: {results}")
    finally:
        for process in ranks:
            process.kill()
            process.join()


def dying(before=lambda *_: None):
    """Instead of sending messages: the process ends."""

    def start_messages(sends, receives, group, over=None, tag=0):
        before(sends, receives, over or group)
        os._exit(0)

    return start_messages


def send_half(sends, receives, group):
    """One of the messages goes out, whole."""
    for peer in sorted(sends)[:1]:
        group.send([sends[peer]], peer, 0).wait()


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
    num_ranks: int = NUM_RANKS,
) -> Iterator[ForkedTraining]:
    """While such a block lasts; each rank calls ``before()``, then ``main(arguments)``."""
    folder.mkdir(parents=True)
    here, there = _FORK.Pipe()
    store = _FORK.Process(target=_keep_store, args=(there,))
    store.start()
    ranks: list[ForkProcess] = []
    try:
        port = here.recv()
        for rank in range(num_ranks):
            environment = rank_environment(rank, num_ranks, port)
            ranks.append(_FORK.Process(target=_fork_main, args=(arguments, environment, folder, before, main)))
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
    num_ranks: int = NUM_RANKS,
) -> subprocess.CompletedProcess[str]:
    """What a training ends with and says."""
    with training_started(arguments, folder, before, main, num_ranks) as training:
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


def _fork_main(
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


_LARGEST, _SMALLEST = 2**28, 2**20


@contextmanager
def memory_of_at_most(num_more_bytes: int) -> Iterator[None]:
    """Beside what it has now this process gets so many bytes.

    What earlier work has left free in its heap is taken first, down to pieces of 1 MB, so that it cannot serve.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        _limit(0, limits)
        kept = _all_that_is_free()
        _limit(num_more_bytes, limits)
        yield
        del kept
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit(num_more_bytes: int, limits: tuple[int, int]) -> None:
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + num_more_bytes, limits[1]))


def _all_that_is_free() -> list[torch.Tensor]:
    kept, size = [], _LARGEST
    while size >= _SMALLEST:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    return kept


@contextmanager
def caught_log_lines(lowest: int = logging.INFO) -> Iterator[list[str]]:
    """A list that fills with what ``zeroresize`` logs from a level on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroresize")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(lowest)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def instances_of(cls):
    """All instances of a class of the package that are made while the block lasts, in the order of their making."""
    made, initialise = [], cls.__init__

    def watched(self, *args, **options):
        initialise(self, *args, **options)
        made.append(self)

    cls.__init__ = watched
    try:
        yield made
    finally:
        cls.__init__ = initialise
