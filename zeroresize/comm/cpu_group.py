"""A second process group of the same ranks, on CPU, to agree on what to do and to exchange numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import explain
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.comm.second_groups import SecondGroup
from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.comm.words import Words
from zeroresize.utils.alike import alike, at_fault, by_rank, lists_by_rank

#: Why the ranks of a CpuGroup meet, for errors.
PURPOSE = "agree on what to balance"
_AGREEMENT = "agreement"
#: The tag of a message that no rank sends.
_NEVER_SENT = 2**31 - 1


def let_others_fail(process_group: ProcessGroup, error: Exception) -> None:
    """Let the ranks that make a :class:`CpuGroup` fail at once, in place of making it on this rank, which cannot.

    A later attempt meets them again, as this one counts.
    """
    Rendezvous(process_group, PURPOSE).fail(_AGREEMENT, error)


class CpuGroup(SecondGroup):
    """A gloo group of the same ranks, for numbers.

    It synchronises no device and puts nothing between the host's collectives. Making it is collective over
    ``process_group`` only, by a :class:`~zeroresize.comm.rendezvous.Rendezvous`. After that the job's store only serves
    to tell of failures and long waits.

    Args:
        process_group: the group of these ranks.
        agreement: the values that must be the same on all of them, by name.
        ranks: the ranks of the new group where they are others, counted over the whole world: ``process_group`` with
            its replicas.
        where: this rank's whereabouts where another group keeps them up to date; None for new ones.
        explains: whether errors and long waits of other transfers over ``process_group`` tell what each rank does, by
            ``where``.

    Attributes:
        rank, size, ranks: this rank within the new group, how many ranks that has, and which of the whole world.
        time_limit: how long every wait may last.
        where: this rank's whereabouts, for errors of waits here and of the layers' collectives over ``process_group``.
        words: tell what the ranks do, where one waits long or fails.

    Raises:
        ValueError: on every rank, if the ranks do not agree; it names what differs and where.
        RuntimeError: if not all ranks come within the time limit of ``process_group``.
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
                never_sent = self.recv([torch.empty(1)], (self.rank + offset) % self.size, _NEVER_SENT)
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
