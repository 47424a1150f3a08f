"""A disk that is full, for this process alone."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes; writing more fails (EFBIG), after a part of it where some fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_when(kind: type, method: str) -> None:
    """From now on no file grows while this method of a class runs."""
    real = getattr(kind, method)

    def called(*arguments: Any, **options: Any) -> Any:
        with files_of_at_most(0):
            return real(*arguments, **options)

    setattr(kind, method, called)
