"""Where planners leave the plans of iterations, and ranks fetch them (DynaPipe, section 3: instruction store)."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import ProcessGroup, TCPStore

from zeroresize.comm.collectives import require_group
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.microbatch.planning_process import PLAN, PlanningError
from zeroresize.utils.deadline import within
from zeroresize.utils.progress import LINE_EVERY_S
from zeroresize.utils.texts import duration_text
from zeroresize.utils.torch_state import reason

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds between two questions for a plan: they begin at the first and double up to the second. And between two
#: whether planners still start.
_LEAST_PAUSE_S, _MOST_PAUSE_S, _LOOK_S = 0.001, 0.05, 1.0
#: Seconds of planners' starts that a wait does not count.
_MOST_START_S = 600.0
#: Seconds within which a store has to answer.
_ANSWER_S = 30.0
_LOOPBACK = "127.0.0.1"


class StoreError(RuntimeError):
    """Tells that an instruction store cannot be reached."""


class SharedStore:
    """Keeps the plans of iterations from when they are made until they have been carried out, for all ranks of a job.

    It is made by :func:`share_store`. Values are compressed text, of which nothing is unpickled or run. Where it cannot
    be reached every call raises a :class:`StoreError`.

    Args:
        store: torch's; this rank's connection to it.
        address: where it is, for messages.
        node, num_nodes: the number of this rank's node, in the order of the ranks, and how many there are.
        is_first_of_node: whether this is the node's first rank, which starts the node's planners.
        rendezvous: of the ranks that share it; None where this one leaves alone.
        answer_s: seconds within which it has to answer.

    Attributes:
        warn_after_s: seconds after which a wait for a plan is warned of; may be set.
    """

    def __init__(
        self,
        store: Any,
        address: str,
        *,
        node: int = 0,
        num_nodes: int = 1,
        is_first_of_node: bool = True,
        rendezvous: Rendezvous | None = None,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self.node, self.num_nodes, self.is_first_of_node = node, num_nodes, is_first_of_node
        self.warn_after_s = 10.0
        self._store, self._address, self._rendezvous = store, address, rendezvous
        self._limit = timedelta(seconds=answer_s)
        self._num_series = self._num_beats = 0

    def new_series(self) -> int:
        """Return the number of a series of plans, the same on all ranks if they call this equally often."""
        self._num_series += 1
        return self._num_series

    def put(self, series: int, iteration: int, value: bytes) -> None:
        """Leave the plan of an iteration, or a failure in its place, of at most :data:`MOST_BYTES`."""
        self._ask(lambda store: store.set(_key(series, iteration), value), f"leave the plan of iteration {iteration}")

    def tell_start(self) -> None:
        """Tell the ranks that processes of this node live, and start: waiting for their plans does not count now."""
        self._num_beats += 1
        number = str(self._num_beats)
        self._ask(lambda store: store.set(_start_key(self.node), number), "tell that planners start")

    def get(self, series: int, iteration: int, timeout_s: float, doing: Callable[[], str], *, warns: bool) -> str:
        """Wait for the plan of an iteration and return it, for so many seconds at most, from when its node's
        processes were last told to start.

        Args:
            doing: tells what planners do, for messages.
            warns: whether to warn after :attr:`warn_after_s` seconds and whenever twice as many have passed, or, while
                planners start, to tell each 15 seconds; of many ranks that wait for the same plan it is enough that
                one does.

        Raises:
            ValueError: what the planner raised, if it was one, naming the iteration.
            PlanningError: if its planner failed otherwise, or it does not come in time.
        """
        began, next_warning_s, pause_s = time.monotonic(), self.warn_after_s, _LEAST_PAUSE_S
        key, purpose = _key(series, iteration), f"fetch the plan of iteration {iteration}"
        start, beat, looked, counted = _start_key(iteration % self.num_nodes), b"", began, began
        while True:
            value = self._ask(lambda store: store.get(key) if store.check([key]) else None, purpose)
            if value is not None:
                return _text_of(iteration, value)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                last, looked = beat, now
                beat = self._ask(lambda store: store.get(start) if store.check([start]) else b"", purpose)
                counted = counted if beat == last or now - began > _MOST_START_S else now
            waited_s = now - began
            if now - counted > timeout_s:
                raise PlanningError(
                    f"no plan of iteration {iteration} came to {self._address} within {timeout_s:g} s: {doing()}"
                )
            if waited_s > next_warning_s and warns:
                starts = counted > began  # which is nothing to warn of
                next_warning_s = waited_s + LINE_EVERY_S if starts else 2.0 * waited_s
                logger.log(
                    logging.INFO if starts else logging.WARNING,
                    "the plan of iteration %d has been waited for since %s, at %s: %s. Training goes on when it "
                    "comes, or fails after %g s",
                    iteration,
                    duration_text(waited_s),
                    self._address,
                    doing(),
                    timeout_s,
                )
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MOST_PAUSE_S)

    def drop(self, places: Iterable[tuple[int, int]]) -> None:
        """Drop plans, each by its series and iteration."""
        keys = [_key(*place) for place in places]
        if keys:
            self._ask(lambda store: [store.delete_key(key) for key in keys], "drop plans")

    def close(self) -> None:
        """Leave the store once all ranks have come to this, after planners are closed; collective.

        Where a rank does not come it is a RuntimeError; this one has left then, too.
        """
        try:
            if self._rendezvous is not None:
                self._rendezvous.part()
        finally:
            self._store = None

    def _ask(self, call: Callable[[Any], _T], purpose: str) -> _T:
        """Return what the store answers; one whose process is stopped would never do."""
        store, asked = self._store, f"the instruction store at {self._address} was asked to {purpose}"
        if store is None:
            raise StoreError(f"{asked}: it is closed here")
        try:
            return within(self._limit, lambda: call(store))
        except (RuntimeError, TimeoutError) as error:
            raise StoreError(
                f"{asked}: {reason(error)}. The process that keeps it, rank 0's, has ended, is stopped, or cannot be "
                "reached from here"
            ) from error


def share_store(process_group: ProcessGroup) -> SharedStore:
    """Make an instruction store in the memory of the group's first rank and open it on all ranks; collective.

    It ends where that rank closes it: call :meth:`SharedStore.close` on all ranks. Ranks of one node reach it by
    loopback, and nobody else does; those of several nodes by the network of the first one, named by ``MASTER_ADDR``,
    whose other users have to be trusted: the store asks nobody who they are.

    Raises:
        RuntimeError: if the store cannot be made or opened on a rank, or one does not come; on all ranks.
    """
    rendezvous = Rendezvous(require_group(process_group), "share an instruction store")
    names = rendezvous.exchange("nodes", socket.gethostname())
    nodes = list(dict.fromkeys(names))
    made, address = None, ""
    if rendezvous.rank == 0:
        name = _LOOPBACK if len(nodes) == 1 else os.environ.get("MASTER_ADDR", nodes[0])
        try:
            made = served_store(name)
        except Exception as error:
            rendezvous.fail("address", error)
            raise
        address = f"{name}:{made.port}"
        if name != _LOOPBACK:
            logger.warning("plans come by %s, which asks nobody who they are: all in its network is trusted", address)
    address = rendezvous.exchange("address", address)[0]
    name, _, port = address.rpartition(":")
    return SharedStore(
        rendezvous.connect(lambda: made or _tcp_store(name, int(port))),
        address,
        node=nodes.index(names[rendezvous.rank]),
        num_nodes=len(nodes),
        is_first_of_node=names.index(names[rendezvous.rank]) == rendezvous.rank,
        rendezvous=rendezvous,
    )


def served_store(name: str = _LOOPBACK) -> TCPStore:
    """Make a store that this process serves under a name of this node, in a thread without Python.

    On loopback the socket is made here: torch would listen on all interfaces.
    """
    if name != _LOOPBACK:
        return _tcp_store(name, 0, is_master=True)
    listener = socket.create_server((name, 0))
    port = listener.getsockname()[1]
    return _tcp_store(name, port, is_master=True, master_listen_fd=listener.detach())


def _tcp_store(name: str, port: int, **options: Any) -> TCPStore:
    return TCPStore(name, port, timeout=timedelta(seconds=_ANSWER_S), wait_for_workers=False, **options)


def _key(series: int, iteration: int) -> str:
    return f"plan/{series}/{iteration}"


def _start_key(node: int) -> str:
    return f"start/{node}"


def _text_of(iteration: int, value: bytes) -> str:
    kind, content = value[:1], value[1:]
    if kind == PLAN:
        return zlib.decompress(content).decode()
    failure = json.loads(content)
    error = ValueError if failure["kind"] == ValueError.__name__ else PlanningError
    text = failure["text"].removeprefix(f"iteration {iteration}: ")  # it is named already
    raise error(f"iteration {iteration} cannot be planned: {text}")
