"""An instruction store for tests, kept by a process that can be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from torch.distributed import TCPStore

from zeroresize.microbatch.store import SharedStore, served_store


class StoreKeeper:
    """A process that keeps a store.

    Attributes:
        store: the first connection to it.
    """

    def __init__(self, **options: float) -> None:
        server = start_forkserver()
        here, there = server.Pipe()
        self._process = server.Process(target=_keep, args=(there,), daemon=True)
        self._process.start()
        self.port = here.recv()
        self.store = self.another(**options)

    def another(self, **options: float) -> SharedStore:
        """The same store, opened again, as other ranks do."""
        limit = timedelta(seconds=30)
        store = TCPStore("127.0.0.1", self.port, timeout=limit, wait_for_workers=False)
        return SharedStore(store, f"127.0.0.1:{self.port}", **options)

    def stop(self) -> None:
        """The process stands still until :meth:`go_on`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self.store.close()
        self.kill()


def start_forkserver() -> ForkServerContext:
    """A process without threads, which has imported everything, to start processes from.

    A fork of this process would keep the locks that its threads hold, and wait for them: threads of the test before
    may still say why their store is away.
    """
    forkserver.set_forkserver_preload(["zeroresize.microbatch.planners", "zeroresize.microbatch.store"])
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _keep(pipe: Connection) -> None:
    store = served_store()
    pipe.send(store.port)
    time.sleep(100.0)
