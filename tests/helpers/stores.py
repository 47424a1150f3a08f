"""Instruction stores of both kinds for tests, each kept by a process that can be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from helpers.redis_servers import RedisServer
from zeroresize.microbatch.embedded_store import EmbeddedStore
from zeroresize.microbatch.open_store import open_store
from zeroresize.microbatch.redis_store import RedisStore

KINDS = ("embedded", "redis")
#: For tests of what the store does not decide: one kind shows it, and the other is tried by the slow tests.
ON_ONE_KIND = pytest.mark.parametrize(
    "keeper", ["embedded", pytest.param("redis", marks=pytest.mark.slow)], indirect=True
)


class EmbeddedKeeper:
    """A process that keeps an embedded store."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()

        def keep() -> None:
            store = EmbeddedStore()
            there.send(store.address)
            time.sleep(100.0)

        self._process = fork.Process(target=keep, daemon=True)
        self._process.start()
        self.address = here.recv()

    def stop(self) -> None:
        """The process stands still until :meth:`go_on`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class StoreKeeper:
    """An instruction store of a kind, and the process that keeps it.

    Attributes:
        store: the first that opened it, as rank 0 does.
    """

    def __init__(self, kind: str, folder: Path, **options: float) -> None:
        self._server = EmbeddedKeeper() if kind == "embedded" else RedisServer(folder)
        self.stop, self.go_on, self.kill = self._server.stop, self._server.go_on, self._server.kill
        if isinstance(self._server, EmbeddedKeeper):
            self.store = EmbeddedStore(self._server.address, **options)
        else:
            self.store = RedisStore(self._server.url, **options)

    def another(self, **options: float):
        """The same store, opened again, as other processes do."""
        return open_store(self.store.address, **options)

    def end(self) -> None:
        self.store.close()
        self.kill()
