"""A process group of some of a group's ranks, made by these alone.

Communicators cannot be made smaller, so the ranks that go on in a job get one of their own. DynMo, section 3.4.2,
splits NCCL's. A split is collective over all ranks of the job, of which an earlier one may have released some. So here
the ranks that stay meet over the job's store. Whatever process hosts that store must live on: torchrun's agent, or rank
0 where it was given an address (``init_method="tcp://…"``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, time_limit


def num_known_groups() -> int:
    """How many groups this process knows: torch names a new one by it, so its ranks must know equally many."""
    return len(dist.distributed_c10d._world.pg_names)


def new_group_of(process_group: ProcessGroup, members: Sequence[int]) -> ProcessGroup:
    """A group of the same backend and time limit; collective over its ranks only.

    Args:
        members: ranks of ``process_group``, counted within it; this rank is one of them.

    Raises:
        RuntimeError: if a rank does not come.
    """
    whole = group_ranks(process_group)
    ranks = [whole[member] for member in members]
    keeps_order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    with _no_split():
        return dist.new_group(
            ranks,
            timeout=time_limit(process_group),
            backend=dist.get_backend_config(process_group),
            use_local_synchronization=True,
            **keeps_order,
        )


@contextmanager
def _no_split() -> Iterator[None]:
    """Groups are made without splitting the job's NCCL communicator, as torch does where that is bound to a device."""
    job: Any = dist.group.WORLD
    device = getattr(job, "bound_device_id", None)
    if device is None:
        yield
        return
    job.bound_device_id = None
    try:
        yield
    finally:
        job.bound_device_id = device
