"""Who waits in collectives, and when: every ``torch.distributed`` call of this process, whoever makes it.

Wall time hides a straggler, since with synchronous collectives every rank's iteration takes equally long; busy time is
what remains without the waits. A rank waits in this package's collectives and in its host's (a gathered classifier,
gradient clipping, a loss), so the calls themselves are watched, where all of them pass: the methods of
``ProcessGroup`` that start a collective and ``Work.wait``. What C++ waits for by itself (a DDP reducer at the end of
backward) is not seen.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

_STARTING_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
    "send",
    "recv",
)


class WaitListener(Protocol):
    """Told when this process enters and leaves a wait."""

    def wait_begins(self) -> None: ...

    def wait_ends(self) -> None: ...


_listeners: weakref.WeakSet[WaitListener] = weakref.WeakSet()
_inside = threading.local()


def listen(listener: WaitListener) -> None:
    """Tell ``listener`` of every wait from now on, for as long as it lives."""
    _watch_torch_distributed()
    _listeners.add(listener)


def stop_listening(listener: WaitListener) -> None:
    _listeners.discard(listener)


@functools.cache
def _watch_torch_distributed() -> None:
    """Wrap the calls once; without listeners the wrappers pass straight through."""
    for name in _STARTING_METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name)))
    setattr(dist.Work, "wait", _watched(dist.Work.wait))  # noqa: B010 - a method of a C++ class


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _listeners or getattr(_inside, "wait", False):
            return method(*args, **kwargs)
        _inside.wait = True
        listeners = tuple(_listeners)
        for listener in listeners:
            listener.wait_begins()
        try:
            return method(*args, **kwargs)
        finally:
            for listener in listeners:
                listener.wait_ends()
            _inside.wait = False

    return call
