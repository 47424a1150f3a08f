"""Further process groups of ranks that have one already.

Torch knows neither a :class:`CpuGroup`, for numbers, nor a :class:`WeightGroup`, for lent weights: nothing else waits
for what travels there. :func:`make_side_group` makes the groups that torch knows, of some of a group's ranks and by
these alone: communicators cannot be made smaller, and a split of NCCL's (DynMo, section 3.4.2) is collective over all
ranks of the job, of which an earlier one may have released some. The members of all of them meet over the job's store:
whatever process keeps that must live on, torchrun's agent, or rank 0 where it was given an address.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from zeroresize.comm.collectives import explain, group_ranks, time_limit
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.comm.words import Whereabouts, Words
from zeroresize.utils.deadline import within
from zeroresize.utils.texts import alike, at_fault, by_rank, lists_by_rank
from zeroresize.utils.torch_private import (
    backend_of,
    groups_are_not_split,
    known_groups,
    name_of_next_group,
    nccl_options,
)

logger = logging.getLogger(__name__)

#: Why the ranks of a CpuGroup meet, for errors.
PURPOSE = "agree on what to balance"
_AGREEMENT = "agreement"
#: The tag of a message that no rank sends.
_NEVER_SENT = 2**31 - 1
#: The first number that no side group of this process has had.
_first_free = 0


class SecondGroup:
    """A :class:`~zeroresize.comm.collectives.Channel` of its own between the ranks of a group.

    A process that ends while threads of the backend live can abort: ``close``, called also at exit, drops the only
    reference to it.
    """

    def __init__(self, transport: Any) -> None:
        self._transport: list[Any] = [transport]
        self.close: Callable[[], object] = weakref.finalize(self, self._transport.clear)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        """Start filling ``tensor`` on every rank with that of rank ``root`` within the group; collective."""
        return self._transport[0].broadcast(tensor, root)

    def send(self, tensors: list[Tensor], receiver: int, tag: int, /) -> Work:
        """Start sending tensors to rank ``receiver`` within the group."""
        return self._transport[0].send(tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> Work:
        """Start filling tensors from rank ``sender`` within the group."""
        return self._transport[0].recv(tensors, sender, tag)

    def allgather(self, parts: list[Tensor], tensor: Tensor, /) -> Work:
        """Start filling ``parts`` with the ``tensor`` of each rank, in the order of the group; collective."""
        return self._transport[0].allgather([parts], [tensor])


def let_others_fail(process_group: ProcessGroup, error: Exception) -> None:
    """Let the ranks that make a :class:`CpuGroup` fail at once where this one cannot; a later attempt meets them."""
    Rendezvous(process_group, PURPOSE).fail(_AGREEMENT, error)


class CpuGroup(SecondGroup):
    """A gloo group of the same ranks, for numbers.

    It synchronises no device and puts nothing between the host's collectives. Making it is collective over
    ``process_group`` only, by a :class:`~zeroresize.comm.rendezvous.Rendezvous`. After that the job's store only serves
    to tell of failures and long waits.

    Args:
        agreement: the values that must be the same on all of them, by name.
        ranks: the ranks of the new group where they are others: ``process_group`` with its replicas.
        where: this rank's whereabouts where another group keeps them up to date; None for new ones.
        explains: whether errors and long waits of other transfers over ``process_group`` tell what each rank does.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        agreement: Mapping[str, str | list[str]],
        ranks: Sequence[int] | None = None,
        where: Whereabouts | None = None,
        *,
        explains: bool = True,
    ) -> None:
        rendezvous = Rendezvous(process_group, PURPOSE, ranks)
        _require_agreement(rendezvous, agreement)
        self.rank, self.size, self.time_limit = rendezvous.rank, rendezvous.size, rendezvous.time_limit
        self.ranks = rendezvous.ranks
        ends = rendezvous.store, self.rank, self.size, self.time_limit
        self.where = where or Whereabouts()
        self.words = Words(rendezvous, self.where)
        super().__init__(rendezvous.connect(lambda: dist.ProcessGroupGloo(*ends)))
        if ranks is None and explains:
            explain(process_group, self.words)

    def abort(self) -> None:
        """End what is under way, with an error on the ranks that wait for it; the group is of no use afterwards.

        Leaving the group would wait for it. A wait that ends by its time limit closes gloo's connections, which its own
        ``abort()`` does not. A rank that has closed its connection cannot be waited for, so each other one is tried.
        """
        for offset in range(1, self.size):
            with suppress(RuntimeError):
                never_sent = self.recv([torch.empty(1, device="cpu")], (self.rank + offset) % self.size, _NEVER_SENT)
                never_sent.wait(timedelta(milliseconds=1))


def _require_agreement(rendezvous: Rendezvous, agreement: Mapping[str, str | list[str]]) -> None:
    agreements = [json.loads(message) for message in rendezvous.exchange(_AGREEMENT, json.dumps(dict(agreement)))]
    for what in agreements[0]:
        values = [agreement_there.get(what) for agreement_there in agreements]
        groups = alike(values)
        if len(groups) > 1:
            are_lists = all(isinstance(value, list) for value in values)
            detail = lists_by_rank(values) if are_lists else by_rank(values)
            raise ValueError(f"the ranks of {rendezvous.whose} do not agree on {what}: {detail}{at_fault(groups)}")


class WeightGroup(SecondGroup):
    """A second gloo or NCCL group of the same ranks, for lent weights on ``device`` alone.

    Transfers of one group wait for each other: gloo starts its collectives in order, two at a time, and has one
    connection for each pair of ranks; NCCL has a stream. The weights of all layers are sent at once, so on the layers'
    own group the first sums would wait for the last weights. Every rank starts the transfers of both groups in one
    order, as NCCL asks of several communicators. With another backend weights travel on the layers' own group.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        rendezvous = Rendezvous(process_group, "connect for the weights that are lent")
        ends = rendezvous.store, rendezvous.rank, rendezvous.size
        kind = backend_of(process_group, device).name()

        def make() -> Any:
            if kind == "gloo":
                return dist.ProcessGroupGloo(*ends, rendezvous.time_limit)
            if kind == "nccl":
                return dist.ProcessGroupNCCL(*ends, nccl_options(rendezvous.time_limit))
            return process_group

        super().__init__(rendezvous.connect(make))


def free_group_number() -> int:
    """Return a number that no side group of this process has had; ranks count from the largest of theirs."""
    return _first_free


def make_side_group(process_group: ProcessGroup, members: Sequence[int], number: int) -> ProcessGroup:
    """Make a group of the same backend and time limit; collective over its members, which must just have met.

    It takes half the time limit of ``process_group`` at most, so that the other ranks hear of a failure before they
    give up waiting. After an error no member has the group; one that comes too late is destroyed. ``members`` are
    counted within ``process_group``; ``number``, the same on all, names it: see :func:`free_group_number`.
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
