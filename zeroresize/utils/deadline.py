"""Calls that may block for ever, waited for until a deadline only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

_T = TypeVar("_T")


def within(limit: timedelta, call: Callable[[], _T]) -> _T:
    """``call()``, which is left to itself after ``limit``.

    It runs in a daemon thread: a store whose keeper is stopped never answers, and torch's own time limits do not end
    every wait for it.

    Raises:
        TimeoutError: if it takes longer; otherwise what ``call`` raises.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="zeroresize, with a deadline")
    thread.start()
    thread.join(limit.total_seconds())
    if not outcome:
        raise TimeoutError(f"no answer within {limit.total_seconds():g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
