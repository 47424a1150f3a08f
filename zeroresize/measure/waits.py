"""When this process waits in a collective: every ``torch.distributed`` call is watched, whoever makes it.

Wall time hides a straggler, since with synchronous collectives every rank's iteration takes equally long. Busy time is
wall time without the waits. A rank waits in this package's collectives and in its host's (a gathered classifier,
gradient clipping, a loss). So the functions that all of them call are wrapped: the methods of ``ProcessGroup`` that
start a collective, ``Work.wait``, the operator by which DTensor and compiled code wait, and DDP's broadcast of buffers.
DDP's reducer waits in C++ for other replicas' gradients, in a callback that autograd runs at the end of a backward. So
these callbacks count as one wait (:func:`watch_end_of_backward`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroresize.utils.torch_private import (
    PRIVATE_COLLECTIVES,
    call_at_end_of_backward,
    current_backward,
    replace_ddp_broadcast,
    replace_functional_wait,
)

_STARTING_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
    "send",
    "recv",
    *PRIVATE_COLLECTIVES,
)


class WaitListener(Protocol):
    """Is called when this process enters and leaves a wait."""

    def wait_begins(self) -> None: ...

    def wait_ends(self) -> None: ...

    def backward_ends(self) -> None:
        """Hear that a watched backward has ended, after its last wait."""


_listeners: weakref.WeakSet[WaitListener] = weakref.WeakSet()
_inside = threading.local()


def listen(listener: WaitListener) -> None:
    """Call ``listener`` at every wait from now on, for as long as it lives."""
    _watch_torch_distributed()
    _listeners.add(listener)


def stop_listening(listener: WaitListener) -> None:
    _listeners.discard(listener)


def watch_end_of_backward() -> None:
    """Count what runs at the end of the current backward, after its last gradient, as a wait; outside one, do nothing.

    Autograd runs callbacks in the order in which they were queued, also those that a callback queues. DDP's reducer
    queues its own with the last gradient. So a callback that is queued now runs before the reducer waits, and one that
    this callback queues runs after it.
    """
    if torch.compiler.is_compiling():  # compiled autograd's graph has no callbacks
        return
    backward = current_backward()
    if backward in (-1, getattr(_inside, "backward", None)):
        return
    _inside.backward = backward
    if getattr(_inside, "wait", False):  # the end of the last backward failed, so its second callback never ran
        _leave()
    call_at_end_of_backward(_end_of_backward_begins)


def _end_of_backward_begins() -> None:
    if getattr(_inside, "wait", False):
        return
    _enter()
    call_at_end_of_backward(_end_of_backward_ends)


def _end_of_backward_ends() -> None:
    listeners = _inside.listeners
    _leave()
    for listener in listeners:
        listener.backward_ends()


def _enter() -> None:
    _inside.wait, _inside.listeners = True, tuple(_listeners)
    for listener in _inside.listeners:
        listener.wait_begins()


def _leave() -> None:
    for listener in _inside.listeners:
        listener.wait_ends()
    _inside.wait = False


@functools.cache
def _watch_torch_distributed() -> None:
    """Wrap the functions once; without listeners a wrapper only calls its function."""
    for name in _STARTING_METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name)))
    setattr(dist.Work, "wait", _watched(dist.Work.wait))  # noqa: B010 - a method of a C++ class
    replace_ddp_broadcast(_watched)
    replace_functional_wait(_watched)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners or getattr(_inside, "wait", False):
            return method(*args, **kwargs)
        _enter()
        try:
            return method(*args, **kwargs)
        finally:
            _leave()

    return call
