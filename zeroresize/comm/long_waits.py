"""A rank that waits long in a collective looks now and then whether the others wait for it elsewhere."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.utils.torch_private import backends_of

#: Seconds between two looks at most: they begin often and double.
_MOST_S = 10.0

#: ``warned_of(what, None, waited_s)`` returns a context that warns if its block takes long, after ``waited_s`` seconds.
WarnedOf = Callable[[str, None, float], AbstractContextManager[None]]
_warnings: weakref.WeakKeyDictionary[ProcessGroup, weakref.WeakMethod[WarnedOf]] = weakref.WeakKeyDictionary()

_Looks = list[tuple["weakref.WeakMethod[Callable[[], None]]", float]]
_looks: weakref.WeakKeyDictionary[ProcessGroup, _Looks] = weakref.WeakKeyDictionary()


def look_in_long_waits(process_group: ProcessGroup, method: Callable[[], None], first_s: float) -> None:
    """Call a method after every ``first_s`` seconds, then twice as many and so on, that a collective is waited for.

    The method is also called when the collective fails, and what it raises ends the wait. It is called for as long as
    its object lives, and with gloo only: NCCL's waits hold up the device, not the process.

    Args:
        process_group: the group whose collectives are meant.
        method: a method, which is kept no longer than its object.
        first_s: how many seconds of a wait pass before the first call.
    """
    if any(backend.name() == "gloo" for backend in backends_of(process_group)):
        _looks.setdefault(process_group, []).append((weakref.WeakMethod(method), first_s))


def warn_in_long_waits(process_group: ProcessGroup, warned_of: WarnedOf) -> None:
    """Warn where a collective is waited for so long that :func:`look_in_long_waits` looks.

    Args:
        process_group: the group whose collectives are meant.
        warned_of: a method, which is kept no longer than its object.
    """
    _warnings[process_group] = weakref.WeakMethod(warned_of)


def is_looked_at(process_group: ProcessGroup, tensor: torch.Tensor) -> bool:
    """Return whether somebody looks while a collective of ``tensor`` is waited for."""
    return not torch.compiler.is_compiling() and bool(_looks) and tensor.is_cpu and bool(_alive(process_group))


def look(process_group: ProcessGroup) -> None:
    """Look now, after a wait that failed; errors as of :func:`wait_looking`."""
    for method, _ in _alive(process_group):
        method()


def wait_looking(work: Any, process_group: ProcessGroup) -> None:
    """Wait for a collective of tensors on the CPU, with looks in between.

    Raises:
        RuntimeError: if the collective fails.
        Exception: whatever a look raises.
    """
    looks = _alive(process_group)
    pause_s = min((first_s for _, first_s in looks), default=_MOST_S)
    began = time.monotonic()
    if _has_ended(work, pause_s):
        return
    weak = _warnings.get(process_group)
    warned_of = weak() if weak is not None else None
    waited_s = time.monotonic() - began
    with nullcontext() if warned_of is None else warned_of("the other ranks in a layer", None, waited_s):
        while True:
            look(process_group)
            pause_s = min(2.0 * pause_s, _MOST_S)
            if _has_ended(work, pause_s):
                return


def _alive(process_group: ProcessGroup) -> list[tuple[Callable[[], None], float]]:
    kept = _looks.get(process_group)
    if not kept:
        return []
    alive = [(method, first_s) for weak, first_s in kept if (method := weak()) is not None]
    if len(alive) < len(kept):
        kept[:] = [(weak, first_s) for weak, first_s in kept if weak() is not None]
    return alive


def _has_ended(work: dist.Work, limit_s: float) -> bool:
    try:
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError:
        if not work.is_completed():
            return False  # gloo's collectives go on when a wait for them ends
        work.wait()
    return True
