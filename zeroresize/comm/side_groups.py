"""Further process groups of some of a group's ranks, made by these alone: the one way to make groups that torch knows.

Communicators cannot be made smaller, so ranks that go on without the others get a group of their own. DynMo, section
3.4.2, splits NCCL's communicator. A split is collective over all ranks of the job, of which an earlier one may have
released some. So here the members meet over the job's store. Whatever process hosts that store must live on: torchrun's
agent, or rank 0 where it was given an address (``init_method="tcp://…"``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, time_limit
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.utils.deadline import within
from zeroresize.utils.torch_private import groups_are_not_split, known_groups, name_of_next_group

logger = logging.getLogger(__name__)

#: The first number that no group of this process has had.
_first_free = 0


def free_group_number() -> int:
    """Return a number from which on no side group of this process has had any.

    Ranks that make groups together count from the largest of theirs, since some may have made groups that others have
    not.
    """
    return _first_free


def make_side_group(process_group: ProcessGroup, members: Sequence[int], number: int) -> ProcessGroup:
    """Make a group of the same backend and time limit; collective over its members, which must just have met.

    It takes half the time limit of ``process_group`` at most, so that the other ranks hear of a failure before they
    give up waiting. After an error no member has the group; one that comes too late is destroyed.

    Args:
        process_group: the group that the members belong to.
        members: the ranks of the new group, counted within ``process_group``; this rank is one of them.
        number: names the group, so it is the same on all members; see :func:`free_group_number`.

    Raises:
        RuntimeError: if a member does not come, or fails, or the job's store does not answer; it says which.
    """
    global _first_free
    _first_free = max(_first_free, number + 1)
    ranks = [group_ranks(process_group)[member] for member in members]
    purpose = f"make a process group of ranks {ranks} of the job"
    rendezvous = Rendezvous(process_group, purpose, ranks, whose="the new group", number=number, has_met=True)
    name = f"zeroresize {'-'.join(map(str, ranks))} {number}"
    keeps_order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    limit, backend = time_limit(process_group), dist.get_backend_config(process_group)

    def make() -> ProcessGroup:
        # torch would name it by how many groups this process knows: ranks may know different ones, and after one was
        # destroyed the next would find the addresses of the old one in the job's store.
        with name_of_next_group(name):
            return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=True, **keeps_order)

    try:
        with groups_are_not_split():
            return rendezvous.connect(make, dist.destroy_process_group)
    except BaseException:
        for group in [group for group, known_name in known_groups().items() if known_name == name]:
            with suppress(Exception):  # the error that is under way says more
                dist.destroy_process_group(group)
        raise


def destroy_side_group(process_group: ProcessGroup) -> None:
    """Leave a group of :func:`make_side_group`; collective over its members, when none of them uses it any more.

    One that cannot be left within its time limit is left to itself, with a warning: nothing depends on it any more.
    """
    limit, ranks = time_limit(process_group), group_ranks(process_group)
    try:
        within(limit, lambda: dist.destroy_process_group(process_group))
    except TimeoutError:
        logger.warning(
            "the process group of ranks %s of the job, which is not used any more, could not be destroyed within %g s",
            ranks,
            limit.total_seconds(),
        )
