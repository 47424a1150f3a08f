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
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks
from zeroresize.policy.slowness.surroundings import Place
from zeroresize.utils.texts import named_ranks
from zeroresize.utils.torch_private import (
    PRIVATE_COLLECTIVES,
    call_at_end_of_backward,
    current_backward,
    known_groups,
    replace_ddp_broadcast,
    replace_functional_wait,
)

_POINT_TO_POINT = ("send", "recv")
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
    *_POINT_TO_POINT,
    *PRIVATE_COLLECTIVES,
)
#: Where a wait is: in the group of this name, and for that rank of it where it is for a single one. None where nothing
#: tells, as in C++ code.
Where: TypeAlias = tuple[str, int | None] | None
#: In what DDP's reducer waits for, among others; no group has this name.
END_OF_BACKWARD: Where = ("end of a backward", None)


class WaitListener(Protocol):
    """Is called when this process enters and leaves a wait."""

    def wait_begins(self, where: Where = None) -> None: ...

    def wait_ends(self) -> None: ...

    def backward_ends(self) -> None:
        """Hear that a watched backward has ended, after its last wait."""


#: Seconds that listening to training has taken in this process.
spent_s = 0.0
#: A tuple, which is quick to go through.
_listeners: tuple[weakref.ref[WaitListener], ...] = ()
_inside = threading.local()
#: Where collectives are that have been started.
_started = weakref.WeakKeyDictionary[dist.Work, Where]()


def listen(listener: WaitListener) -> None:
    """Call ``listener`` at every wait from now on, for as long as it lives."""
    global _listeners
    _watch_torch_distributed()
    _listeners += (weakref.ref(listener, _forget),)


def spend(began: float) -> None:
    """Count the time since ``began`` as spent on listening."""
    global spent_s
    spent_s += time.perf_counter() - began


def place_of(where: Where) -> Place:
    """Name the group of a wait, and its rank, for people; without a name where nothing tells, or the group is gone."""
    name, peer = where or ("", None)
    group = next((group for group, known_name in known_groups().items() if known_name == name), None)
    if group is None:
        return Place("")
    ranks, kind = group_ranks(group), group.group_desc
    if peer is not None:
        return Place(f"rank {ranks[peer]} of the job")
    name = "all ranks" if kind == "default_pg" else f"group {kind.removeprefix('mesh_')}"
    if kind in ("", "undefined"):
        name = named_ranks(ranks[:2]) + (", …" if len(ranks) > 2 else "")
    return Place(name, ranks[0], len(ranks))


def stop_listening(listener: WaitListener) -> None:
    _forget(weakref.ref(listener))


def _forget(reference: weakref.ref[WaitListener]) -> None:
    global _listeners
    _listeners = tuple(each for each in _listeners if each() is not None and each != reference)


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
    if _listeners:
        call_at_end_of_backward(_end_of_backward_begins)


def _end_of_backward_begins() -> None:
    if getattr(_inside, "wait", False):
        return
    _enter(END_OF_BACKWARD)
    call_at_end_of_backward(_end_of_backward_ends)


def _end_of_backward_ends() -> None:
    listeners = _inside.listeners
    _leave()
    for listener in listeners:
        listener.backward_ends()


def _enter(where: Where = None) -> None:
    began = time.perf_counter()
    _inside.wait = True
    _inside.listeners = [listener for reference in _listeners if (listener := reference()) is not None]
    for listener in _inside.listeners:
        listener.wait_begins(where)
    spend(began)


def _leave() -> None:
    began = time.perf_counter()
    for listener in _inside.listeners:
        listener.wait_ends()
    _inside.wait = False
    spend(began)


@functools.cache
def _watch_torch_distributed() -> None:
    """Wrap the functions once; without listeners a wrapper only calls its function."""
    for name in _STARTING_METHODS:
        if hasattr(dist.ProcessGroup, name):
            where = _where_of_peer if name in _POINT_TO_POINT else _where_of_group
            setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name), where))
    setattr(dist.Work, "wait", _watched(dist.Work.wait, _where_of_work))  # noqa: B010 - a method of a C++ class
    replace_ddp_broadcast(lambda method: _watched(method, _where_of_group))
    replace_functional_wait(_watched)


def _where_of_group(group: ProcessGroup, *_: Any) -> Where:
    return group.group_name, None


def _where_of_peer(group: ProcessGroup, _tensors: Any, peer: int, *_: Any) -> Where:
    return group.group_name, peer


def _where_of_work(work: dist.Work, *_: Any) -> Where:
    return _started.pop(work, None)


def _watched(method: Callable[..., Any], where_of: Callable[..., Where] | None = None) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners or getattr(_inside, "wait", False):
            return method(*args, **kwargs)
        where: Where = None
        if where_of is not None:
            with suppress(RuntimeError, TypeError):  # a group without a name, or a peer given by name
                where = where_of(*args)
        _enter(where)
        try:
            result = method(*args, **kwargs)
        finally:
            _leave()
        if where is not None and isinstance(result, dist.Work):
            _started[result] = where
        return result

    return call
