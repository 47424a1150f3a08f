"""The ranks of a job get one instruction store, and learn which of them start planners."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import require_group
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.microbatch.embedded_store import EmbeddedStore
from zeroresize.microbatch.open_store import open_store
from zeroresize.microbatch.store import InstructionStore


@dataclass(frozen=True)
class SharedStore:
    """Describe a rank's part of a store that the ranks of a job share.

    Attributes:
        store: this rank's connection to it.
        host: the number of this rank's host, in the order of the ranks.
        num_hosts: how many hosts the ranks are on.
        is_first_of_host: whether this is the host's first rank: it starts the host's
            :class:`~zeroresize.microbatch.planners.Planners`.
    """

    store: InstructionStore
    host: int
    num_hosts: int
    is_first_of_host: bool
    _rendezvous: Rendezvous = field(repr=False, compare=False)

    def close(self) -> None:
        """Leave the store once all ranks have come to this, so that nobody loses it early; collective.

        Planners are closed before. After an error on one rank, ``store.close()`` waits for nobody.

        Raises:
            RuntimeError: if a rank does not come; this one has left then, too.
        """
        try:
            self._rendezvous.exchange("closed")
        finally:
            self.store.close()


def share_store(process_group: ProcessGroup, address: str | None = None) -> SharedStore:
    """Make an instruction store for a run and open it on all ranks; collective.

    It ends where the group's first rank closes it: call :meth:`SharedStore.close` on all ranks.

    Args:
        process_group: the ranks that carry out plans together.
        address: of a Redis server, for jobs of several hosts whose plans are not to depend on rank 0; None for a store
            that rank 0 keeps. That of rank 0 counts.

    Raises:
        ValueError: on rank 0, for an address of another kind.
        RuntimeError: if the store cannot be made or opened on a rank, or one does not come; on all ranks.
    """
    rendezvous = Rendezvous(require_group(process_group), "share an instruction store")
    names = rendezvous.exchange("hosts", socket.gethostname())
    hosts = list(dict.fromkeys(names))
    made: InstructionStore | None = None
    if rendezvous.rank == 0:
        try:
            made = open_store(address) if address is not None else EmbeddedStore(host=_name_for(hosts))
        except Exception as error:
            rendezvous.fail("address", error)
            raise
    shared_address = rendezvous.exchange("address", "" if made is None else made.address)[0]
    store = rendezvous.connect(lambda: made or open_store(shared_address), InstructionStore.close)
    name = names[rendezvous.rank]
    return SharedStore(store, hosts.index(name), len(hosts), names.index(name) == rendezvous.rank, rendezvous)


def _name_for(hosts: list[str]) -> str:
    """By what the ranks on these hosts reach the first."""
    return "127.0.0.1" if len(hosts) == 1 else os.environ.get("MASTER_ADDR", hosts[0])
