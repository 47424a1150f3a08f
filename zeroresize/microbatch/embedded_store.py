"""An instruction store that needs no server: torch's TCPStore, kept by one of the job's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from zeroresize.microbatch.store import ANSWER_S, InstructionStore, StoreError
from zeroresize.utils.deadline import within
from zeroresize.utils.memory_errors import reason

_T = TypeVar("_T")

#: Bytes that a value may have: TCPStore closes the connection of who sends 8 MiB.
_MOST_BYTES = 8 * 2**20 - 1024


class EmbeddedStore(InstructionStore):
    """Keeps plans in the memory of the process that makes it, which serves them in a thread without Python.

    It ends with that process, and so do the waits for what is in it: with an error that names its address. As the job's
    own store it asks nobody who they are, so the hosts' network has to be closed to others.

    Args:
        address: ``tcp://host:port`` of a store that another process has made; None to make one.
        host: the name of this host by which others reach it, for a store that is made.
        port: where it listens then; 0 for any port that is free.
        answer_s: seconds within which it has to answer.

    Raises:
        ValueError: for an address of another kind.
        StoreError: if the store cannot be reached, or the port is taken.
    """

    def __init__(
        self, address: str | None = None, *, host: str = "127.0.0.1", port: int = 0, answer_s: float = ANSWER_S
    ) -> None:
        serves = address is None
        if address is not None:
            host, port = _host_and_port(address)
        self.address = address or f"tcp://{host}:{port or 'any port'}"
        self._limit = limit = timedelta(seconds=answer_s)
        self._store: Any = self._answer(
            lambda: TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False),
            "make it" if serves else "open it",
        )
        self.address = f"tcp://{host}:{self._store.port}"

    def close(self) -> None:
        """Leave the store; in the process that made it, it ends."""
        self._store = None

    def _set(self, name: str, value: bytes, purpose: str) -> None:
        if len(value) > _MOST_BYTES:
            raise StoreError(
                f"{self._asked(purpose)}: it takes {_MOST_BYTES} bytes at most, and this has {len(value)}; a Redis "
                "server takes more"
            )
        store = self._opened(purpose)
        self._answer(lambda: store.set(name, value), purpose)

    def _get(self, name: str, purpose: str) -> bytes | None:
        store = self._opened(purpose)
        return self._answer(lambda: store.get(name) if store.check([name]) else None, purpose)

    def _delete(self, names: Iterable[str], purpose: str) -> None:
        store = self._opened(purpose)
        self._answer(lambda: [store.delete_key(name) for name in names], purpose)

    def _names(self, purpose: str) -> list[str]:
        store = self._opened(purpose)
        return self._answer(lambda: list(store.list_keys()), purpose)

    def _opened(self, purpose: str) -> Any:
        if self._store is None:
            raise StoreError(f"{self._asked(purpose)}: it is closed here")
        return self._store

    def _answer(self, call: Callable[[], _T], purpose: str) -> _T:
        """Return what the store answers; a server that is stopped would never do."""
        try:
            return within(self._limit, call)
        except (RuntimeError, TimeoutError) as error:
            raise StoreError(
                f"{self._asked(purpose)}: {reason(error)}. The process that keeps it, usually rank 0's, has ended, is "
                "stopped, or cannot be reached from here"
            ) from error

    def _asked(self, purpose: str) -> str:
        return f"the instruction store at {self.shown_address} was asked to {purpose}"


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    with suppress(ValueError):  # a port that is none
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise ValueError(f"{address!r} is not allowed: the address of an embedded store is tcp://host:port")
