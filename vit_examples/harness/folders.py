"""Output folders: each is one run's alone while that writes into it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make an output folder; within such a block it is this process's alone, by a lock that ends with the process."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "run.lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"output.folder={folder}: another run is writing there") from error
        yield


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Errors of writing to ``folder`` within such a block are a user's: a ValueError that names the folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"output.folder={folder}: cannot be written to: {error}") from error


def empty(*folders: Path) -> None:
    """Make each of ``folders`` an empty one."""
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(claimed(folder))
        for folder in folders:
            with writable(folder):
                shutil.rmtree(folder)
                folder.mkdir()
