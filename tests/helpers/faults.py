"""What can go wrong around a program: full disks, checkpoints that run code, files that may not be written."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Evil:
    """Unpickling it makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def change_index(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Let ``change`` do something to what torch.distributed.checkpoint has written as its index."""
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def put_into_planner_data(checkpoint: Path, marker: Path) -> None:
    """Code that runs when the index is unpickled, which leaves all that is read of it as it was."""

    def put(index: Any) -> None:
        index.planner_data = {**(index.planner_data or {}), "evil": Evil(marker)}

    change_index(checkpoint, put)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes; writing more fails (EFBIG), after a part of it where some fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def writable_by_all(folder: Path) -> list[Path]:
    """Files and folders in ``folder``, and itself, that everybody may write to."""
    return [one for one in (folder, *folder.rglob("*")) if one.stat().st_mode & stat.S_IWOTH]


def sigterm_at(call: int, owner: Any, name: str, times: int = 1) -> None:
    """Rank 1 gets SIGTERM, no other rank does, within the call of this number of a function or method."""
    function, calls = getattr(owner, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        for _ in range(times if len(calls) == call and os.environ["RANK"] == "1" else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    setattr(owner, name, counted)


def full_disk_on_rank_1() -> None:
    """From now on its files can grow to 3,000 bytes only: the summary fits, a checkpoint does not."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


def saying_status(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
    """``main``, each rank of which says its exit status, and whether it has left the others, and ends with 0."""

    def run(arguments: Sequence[str]) -> None:
        try:
            main(arguments)
        except SystemExit as end:
            print(f"status {end.code}, {'joined' if dist.is_initialized() else 'left'}")

    return run
