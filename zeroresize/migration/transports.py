"""The ways of migrating, by name."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, group_rank
from zeroresize.migration.broadcast_reduce import BroadcastReduce
from zeroresize.migration.buffers import Buffers
from zeroresize.migration.scatter_gather import ScatterGather
from zeroresize.migration.transport import Transport

_TRANSPORTS: dict[str, type[Transport]] = {"broadcast-reduce": BroadcastReduce, "scatter-gather": ScatterGather}


def make_transport(
    migration_transport: str, process_group: ProcessGroup, buffers: Buffers, over: Channel | None = None
) -> Transport:
    """What carries slices by the configuration's ``migration_transport``, ``over`` the group or another channel."""
    return _TRANSPORTS[migration_transport](process_group, group_rank(process_group), buffers, over)
