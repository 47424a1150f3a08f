"""The ranks of a group once more, on CPU, where they agree on what to do and exchange numbers."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.collectives import Transfer, group_rank, group_ranks, time_limit


class CpuGroup:
    """The ranks of a group once more, on CPU (gloo), for numbers: no device synchronisation, nothing in between the
    host's collectives.

    It meets through the default group's store under a name of its own. (``torch.distributed.new_group`` with local
    synchronisation derives the name from how many groups a rank knows, so it hangs where ranks know different ones.)
    Making it is collective over ``process_group`` only, which makes it safe under DP × TP. Waits in it may last as long
    as those in ``process_group``: who is late to one, as after a checkpoint, is late to both.

    Args:
        process_group: whose ranks.
        agreement: what must be the same on all of them, by name.

    Raises:
        ValueError: on every rank, if the ranks do not agree, naming what differs and where.
        RuntimeError: if not all ranks come within the time limit of ``process_group``.
    """

    _num_made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, process_group: ProcessGroup, agreement: Mapping[str, str]) -> None:
        ranks = tuple(group_ranks(process_group))
        self.rank, self.size = group_rank(process_group), len(ranks)
        self._process_group, self._time_limit = process_group, time_limit(process_group)
        name = f"zeroresize/{'-'.join(map(str, ranks))}/{self._num_made[ranks]}"
        self._num_made[ranks] += 1
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._num_agreements = 0
        self.require_agreement(agreement)
        # A process that ends with gloo's threads alive can abort; dropping the group, also at exit, ends them.
        self._gloo: list[Any] = [dist.ProcessGroupGloo(self._store, self.rank, self.size, self._time_limit)]
        self.close = weakref.finalize(self, self._gloo.clear)
        self._meet("connected", "")  # nobody may leave again while others are still connecting

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
        messages = self._meet(f"agreement {self._num_agreements}", json.dumps(dict(agreement)))
        by_rank = [json.loads(message) for message in messages]
        for what in by_rank[0]:
            said = [values.get(what) for values in by_rank]
            if len(set(said)) > 1:
                detail = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
                raise ValueError(f"the ranks of the group do not agree on {what}: {detail}")

    def _meet(self, where: str, message: str) -> list[str]:
        """Leave a message and wait for those of all ranks."""
        store = self._store
        store.set(f"{where}/{self.rank}", message)
        keys = [f"{where}/{rank}" for rank in range(self.size)]
        try:
            store.wait(keys, self._time_limit)
        except Exception as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"ranks {missing} of the group did not come to agree on what to balance within "
                f"{self._time_limit.total_seconds():g} s, the time limit of their process group (timeout=... where it "
                "is made): they may have died, or do something longer, such as writing a checkpoint"
            ) from error
        return [store.get(key).decode() for key in keys]
