"""What every training program does around its training: the command line, mistakes, signals, ranks that agree."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vit_examples.harness.config_reader import ConfigReader
from zeroresize.comm.collectives import time_limit

_T = TypeVar("_T")
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Ranks that a dry run assumes where nothing says how many.
_DRY_RANKS = 2
_MISTAKE, _INTERRUPTED, TERMINATED = 2, 128 + signal.SIGINT, 128 + signal.SIGTERM
#: torchrun sends a signal on to ranks that may have it already (the terminal): the same again within so many seconds.
_SAME_S = 3.0
#: A rank whose collective failed because another was interrupted first has its own signal within so many seconds.
_DELAY_S = 0.3
#: Seconds for which ranks wait for each other before they leave.
_LEAVE_TOGETHER_S = 30.0


def run_program(
    arguments: Sequence[str] | None,
    reader: ConfigReader[Any],
    *,
    dry_run: Callable[[Any, int], Any],
    run: Callable[..., None],
    hint: Callable[[Any], str],
) -> None:
    """Run a program: a mistake of the user's ends it with one line and status 2, Ctrl-C with one line and 130.

    Whatever the umask, nobody but the owner and the group may write to the files that it makes.

    Args:
        dry_run: is given a configuration and the number of ranks.
        run: trains, and leaves the process groups; called as ``run(config, resume=...)``. A ValueError is a mistake.
        hint: says after an interrupt how to go on.
    """
    os.umask(os.umask(0) | stat.S_IWOTH)  # what a run resumes from is not for everybody to change
    try:
        parsed = reader.argument_parser().parse_args(arguments)
        config = reader.from_arguments(parsed)
        if parsed.dry_run:
            num_ranks = parsed.ranks if parsed.ranks is not None else int(os.environ.get("WORLD_SIZE", "0"))
            if num_ranks < 0 or parsed.ranks == 0:
                raise ValueError(f"--ranks {num_ranks}: at least 1 is needed")
            dry_run(config, num_ranks or _DRY_RANKS)
            return
        if missing := [name for name in _TORCHRUN_VARIABLES if name not in os.environ]:
            raise ValueError(
                f"{', '.join(missing)} not set: training runs on several ranks, start it with "
                f"`torchrun --nproc-per-node 2 -m {reader.program}` (or add --dry-run to check only)"
            )
        with _ended_by_interrupt(lambda: hint(config)):
            if os.environ["RANK"] == "0":
                _show_messages()
            run(config, resume=parsed.resume)
    except ValueError as error:
        rank = os.environ.get("RANK")
        sys.stderr.write(f"error: {error}\n" if rank is None else f"error (rank {rank}): {error}\n")  # whole
        sys.stderr.flush()
        raise SystemExit(_MISTAKE) from error


def agreed(
    call: Callable[[], _T],
    process_group: ProcessGroup | None = None,
    *,
    kind: type[Exception] = ValueError,
    first_only: bool = False,
) -> _T:
    """``call()``, and whether it has failed on any rank; collective.

    Args:
        first_only: call it on the first rank alone, whose result it has; the others have None.
    """
    result, failure = None, None
    if not first_only or dist.get_rank(process_group) == 0:
        try:
            result = call()
        except kind as error:
            failure = str(error)
    failures = of_all_ranks(failure, process_group)
    if len(different := {text for text in failures if text is not None}) == 1:
        raise kind(different.pop())
    if different:
        raise kind("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None))
    return cast("_T", result)


def of_all_ranks(value: Any, process_group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``; collective."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def join(timeout_s: float) -> ProcessGroup:
    """Join the other ranks that torchrun has started, by gloo; collectives fail after so many seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def leave_together() -> None:
    """Leave the process groups once all ranks of the job want to: gloo may abort a rank whose peers left early."""
    if dist.get_backend() == "gloo":
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=_LEAVE_TOGETHER_S))
    dist.destroy_process_group()


@contextmanager
def left_together(leave: Callable[[], None] = leave_together) -> Iterator[None]:
    """Call ``leave`` behind a block that has ended well, or in which all ranks have ended the program."""
    try:
        yield
    except SystemExit:
        leave()
        raise
    leave()


@contextmanager
def noted_sigterm() -> Iterator[Callable[[ProcessGroup], bool]]:
    """Note SIGTERM, which schedulers send before they kill; another one that comes seconds later kills.

    Yields a collective: whether any rank of a group has noted it. It goes by gloo, so that no GPU is waited for.
    """
    noted_at, gloo = list[float](), list[ProcessGroup]()

    def note(signal_number: int, frame: FrameType | None) -> None:
        noted_at.append(time.monotonic())
        if noted_at[-1] - noted_at[0] > _SAME_S:
            signal.signal(signal_number, signal.SIG_DFL)
            signal.raise_signal(signal_number)

    def is_noted(process_group: ProcessGroup) -> bool:
        if "cpu:gloo" not in dist.get_backend_config(process_group):  # NCCL alone
            gloo[:] = gloo or [dist.new_group(backend="gloo", timeout=time_limit(process_group))]
            process_group = gloo[0]
        number = torch.tensor(len(noted_at))
        dist.all_reduce(number, group=process_group)
        return bool(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield is_noted
    finally:
        if not noted_at:  # else the same again is not to disturb the end of the process
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _ended_by_interrupt(hint: Callable[[], str]) -> Iterator[None]:
    """End the process with status 130 on an interrupt; one that is ignored, as in the background, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    interrupted_at: list[float] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not interrupted_at or now - interrupted_at[-1] > _SAME_S:
            interrupted_at.append(now)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            yield
        except Exception:
            time.sleep(_DELAY_S)
            raise
    except BaseException:
        if not interrupted_at:
            raise
        before = signal.SIG_IGN  # nothing is to disturb the end of the process
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"interrupted: {hint()}\n")
            sys.stderr.flush()
        raise SystemExit(_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _show_messages() -> None:
    """What the library has to say: which layers it took, what its calibrations found."""
    library = logging.getLogger("zeroresize")
    library.setLevel(logging.INFO)
    library.propagate = False  # hosts that show everything would show it twice
    if not library.handlers:
        library.addHandler(logging.StreamHandler())
