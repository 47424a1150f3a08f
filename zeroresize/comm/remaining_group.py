"""A process group of some of a group's ranks, made by these alone.

Communicators cannot be made smaller, so the ranks that go on in a job get one of their own. DynMo, section 3.4.2,
splits NCCL's. A split is collective over all ranks of the job, of which an earlier one may have released some. So here
the ranks that stay meet over the job's store. Whatever process hosts that store must live on: torchrun's agent, or rank
0 where it was given an address (``init_method="tcp://…"``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, time_limit

#: How many groups of these ranks of the whole job this process has made.
_num_made: Counter[tuple[int, ...]] = Counter()


def num_known_groups() -> int:
    """How many groups this process knows: ranks that know different ones have not made the same."""
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
    with _no_split(), _name_of_its_own():
        return dist.new_group(
            ranks,
            timeout=time_limit(process_group),
            backend=dist.get_backend_config(process_group),
            use_local_synchronization=True,
            **keeps_order,
        )


def destroy_group(process_group: ProcessGroup) -> None:
    """Leave a group of :func:`new_group_of`, which all of its ranks leave when none of them uses it any more."""
    dist.destroy_process_group(process_group)


@contextmanager
def _name_of_its_own() -> Iterator[None]:
    """The group's name is one that no group of these ranks had before.

    torch names it by how many groups a process knows. Where one was destroyed, the next would get its name, and find
    the addresses of the old one in the job's store.
    """
    torch_groups: Any = dist.distributed_c10d
    usual = getattr(torch_groups, "_process_group_name", None)
    if usual is None:  # another version of torch
        yield
        return

    def name_of(ranks: Sequence[int], use_hashed_name: bool) -> str:
        name = f"zeroresize {'-'.join(map(str, ranks))} {_num_made[tuple(ranks)]}"
        _num_made[tuple(ranks)] += 1
        return name

    torch_groups._process_group_name = name_of
    try:
        yield
    finally:
        torch_groups._process_group_name = usual


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
