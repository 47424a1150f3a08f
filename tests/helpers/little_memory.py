"""A process whose memory runs out."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_of_at_most(num_more_bytes: int) -> Iterator[None]:
    """Beside what it has now this process gets so many bytes; some of what it has may be free."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + num_more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
