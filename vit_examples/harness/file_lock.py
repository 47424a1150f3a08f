"""One process at a time, by a lock that ends with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

#: Somebody else holds the lock.
_HELD = {errno.EAGAIN, errno.EACCES}
#: The file system knows no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Nobody else is within such a block of the same path.

    The file ``path`` is made, stays empty, and stays behind: it is the lock upon it (``flock``) that counts, and the
    system takes that back however its process ends. It holds between machines where their common file system has locks:
    NFS has, Lustre if mounted with ``flock``. Where there are none at all a warning says so, and nobody is kept out.

    Args:
        refusal: what to say if somebody is within one; a ValueError then.

    Raises:
        ValueError: also if the file cannot be made, or is a symbolic link.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(f"{path}: cannot be locked: {error.strerror}") from error
    try:
        _lock(file, path, refusal)
        yield
    finally:
        os.close(file)


def _lock(file: int, path: Path, refusal: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise ValueError(f"{refusal} ({path} is locked)") from error
        if error.errno not in _NO_LOCKS:
            raise ValueError(f"{path}: cannot be locked: {error.strerror}") from error
        logger.warning("%s: its file system has no locks: nothing keeps others from writing there, too", path)
