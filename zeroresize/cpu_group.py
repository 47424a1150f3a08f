"""The ranks of a group once more, on CPU, where they agree on what to do and exchange numbers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.collectives import Transfer
from zeroresize.meeting import Meeting


class CpuGroup:
    """The ranks of a group once more, on CPU (gloo), for numbers: no device synchronisation, nothing in between the
    host's collectives.

    Making it is collective over ``process_group`` only, in the way of :class:`~zeroresize.meeting.Meeting`.

    Args:
        process_group: whose ranks.
        agreement: what must be the same on all of them, by name.

    Raises:
        ValueError: on every rank, if the ranks do not agree, naming what differs and where.
        RuntimeError: if not all ranks come within the time limit of ``process_group``.
    """

    def __init__(self, process_group: ProcessGroup, agreement: Mapping[str, str]) -> None:
        self._process_group = process_group
        self._meeting = Meeting(process_group, "agree on what to balance")
        self.rank, self.size = self._meeting.rank, self._meeting.size
        self._num_agreements = 0
        self.require_agreement(agreement)
        # A process that ends with gloo's threads alive can abort; dropping the group, also at exit, ends them.
        self._gloo: list[Any] = [
            dist.ProcessGroupGloo(self._meeting.store, self.rank, self.size, self._meeting.time_limit)
        ]
        self.close = weakref.finalize(self, self._gloo.clear)
        self._meeting.exchange("connected")  # nobody may leave again while others are still connecting

    def start_all_gather(self, parts: list[Tensor], tensor: Tensor) -> Transfer:
        """Start filling ``parts`` with every rank's ``tensor``."""
        start = partial(self._gloo[0].allgather, [parts], [tensor])
        return Transfer(start, "exchanging the balancer's numbers with", self._process_group)

    def require_agreement(self, agreement: Mapping[str, str]) -> None:
        """Compare values by name; collective.

        Raises:
            ValueError: on every rank, if the ranks do not agree, naming what differs and where.
            RuntimeError: if not all ranks come within the time limit of ``process_group``.
        """
        self._num_agreements += 1
        messages = self._meeting.exchange(f"agreement {self._num_agreements}", json.dumps(dict(agreement)))
        by_rank = [json.loads(message) for message in messages]
        for what in by_rank[0]:
            said = [values.get(what) for values in by_rank]
            if len(set(said)) > 1:
                detail = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
                raise ValueError(f"the ranks of the group do not agree on {what}: {detail}")
