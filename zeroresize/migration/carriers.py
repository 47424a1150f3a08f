"""The ways of migrating, by name."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Transport, group_rank
from zeroresize.migration.broadcast_reduce import BroadcastReduce
from zeroresize.migration.buffers import Buffers
from zeroresize.migration.carrier import Carrier
from zeroresize.migration.scatter_gather import ScatterGather

_CARRIERS: dict[str, type[Carrier]] = {"broadcast-reduce": BroadcastReduce, "scatter-gather": ScatterGather}


def make_carrier(migrate: str, process_group: ProcessGroup, buffers: Buffers, over: Transport | None = None) -> Carrier:
    """The carrier of the configuration's ``migrate``, ``over`` the group itself or another transport."""
    return _CARRIERS[migrate](process_group, group_rank(process_group), buffers, over)
