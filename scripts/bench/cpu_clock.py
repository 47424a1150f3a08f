"""A clock of CPU time, as if each rank had a core of its own: for ranks that share cores, also with other programs.

It counts the CPU time of this process's main thread, and what it sleeps by the clock. Where ranks meet, in every
collective and message, their clocks do, too: who waits is set on to when the last one came, and a link's time later.
What is really computed and sent is that of any run.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

#: Of a message over the link: seconds, and bytes a second.
LATENCY_S, BYTES_PER_S = 30e-6, 5e9
_COLLECTIVES = ("allreduce", "allgather", "_allgather_base", "reduce", "broadcast", "gather", "barrier")


class CpuClock:
    """Holds the time of this rank; made after ``dist.init_process_group``, collective."""

    def __init__(self) -> None:
        self._thread, self._ahead_s = time.pthread_getcpuclockid(threading.get_ident()), 0.0
        self._clocks = dist.new_group(backend="gloo")
        self._all_reduce, self._wait = dist.ProcessGroup.allreduce, dist.Work.wait
        self._send, self._receive = dist.ProcessGroup.send, dist.ProcessGroup.recv
        self._pending: dict[int, tuple[Any, Any, torch.Tensor, float]] = {}
        group: Any = dist.ProcessGroup
        for name in _COLLECTIVES:
            setattr(group, name, self._collective(name, getattr(group, name)))
        group.send, group.recv = self._message(self._send), self._message(self._receive)
        dist.Work.wait = self._waiting()  # type: ignore[method-assign]

    def now(self) -> float:
        """Seconds."""
        return time.clock_gettime(self._thread) + self._ahead_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, by this clock alone."""
        self._ahead_s += seconds

    def put_into(self, package: str) -> None:
        """Let the modules of a package that are imported by now measure by this clock."""
        others = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
        stand_in = types.SimpleNamespace(**others | {"perf_counter": self.now})
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{package}.") and getattr(module, "time", None) is time:
                module.time = stand_in  # type: ignore[attr-defined]

    def _is_at(self, seconds: float) -> None:
        self._ahead_s += seconds - self.now()

    def _collective(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def start(group: Any, *arguments: Any, **others: Any) -> Any:
            began_s = self.now()
            work = method(group, *arguments, **others)
            root = getattr(arguments[-1], "rootRank", 0) if arguments and name in ("broadcast", "reduce") else None
            counts = name != "broadcast" or root == dist.get_rank()
            sent = torch.tensor([began_s if counts else 0.0], dtype=torch.float64)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            sending = self._all_reduce(self._clocks, [sent], options)
            waits = name != "reduce" or root == dist.get_rank()
            seconds = LATENCY_S + _bytes_of(arguments[:1]) / BYTES_PER_S
            self._pending[id(work)] = work, sending, sent if waits else torch.zeros(1), seconds
            self._is_at(began_s)
            return work

        return start

    def _message(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def start(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            began_s = self.now()
            work, sent = method(group, tensors, peer, tag), torch.tensor([began_s], dtype=torch.float64)
            sending = method(self._clocks, [sent], peer, tag)
            sends = method is self._send
            seconds = 0.0 if sends else LATENCY_S + _bytes_of(tensors) / BYTES_PER_S
            self._pending[id(work)] = work, sending, sent, seconds
            self._is_at(began_s)
            return work

        return start

    def _waiting(self) -> Callable[..., Any]:
        def wait(work: Any, *arguments: Any, **others: Any) -> Any:
            began_s = self.now()
            result = self._wait(work, *arguments, **others)
            _, sending, sent, seconds = self._pending.pop(id(work), (None, None, None, 0.0))
            if sent is not None:
                self._wait(sending)
                began_s = max(began_s, sent.item() + seconds)
            self._is_at(began_s)
            return result

        return wait


def _bytes_of(values: Iterable[Any]) -> int:
    """Of tensors in lists of lists."""
    sizes = (
        value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _bytes_of(value)
        for value in values
        if isinstance(value, torch.Tensor | list | tuple)
    )
    return sum(sizes)
