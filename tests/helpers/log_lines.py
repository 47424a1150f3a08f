"""The log lines of the package, caught inside a rank, where pytest's ``caplog`` does not reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
