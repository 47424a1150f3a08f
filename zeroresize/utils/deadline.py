"""Calls that may block for ever, waited for until a deadline only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

_T = TypeVar("_T")


def within(limit: timedelta, call: Callable[[], _T], give_up: Callable[[_T], object] | None = None) -> _T:
    """Return what ``call()`` returns, or leave it to itself after ``limit``; a later result goes to ``give_up``, there.

    The call runs in a daemon thread: a store whose keeper is stopped never answers, and torch's own time limits do not
    end every wait for it.
    """
    outcome: list[tuple[Any, BaseException | None]] = []
    is_left, lock = threading.Event(), threading.Lock()

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with lock:
            if not is_left.is_set():
                outcome.append((result, failure))
                return
        if failure is None and give_up is not None:
            with suppress(Exception):  # nobody is left to hear of it
                give_up(result)

    thread = threading.Thread(target=run, daemon=True, name="zeroresize, with a deadline")
    thread.start()
    try:
        thread.join(limit.total_seconds())
    finally:  # an interrupt leaves the call to itself as well
        with lock:
            is_left.set()
    if not outcome:
        raise TimeoutError(f"no answer within {limit.total_seconds():g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
