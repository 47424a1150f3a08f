"""A place where the ranks of a group meet before they have a connection of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.collectives import group_rank, group_ranks, time_limit


class Meeting:
    """A part of the default group's store that is the ranks' own, for one purpose.

    (``torch.distributed.new_group`` with local synchronisation names it after how many groups a rank knows, so it hangs
    where ranks know different ones.) Nothing here needs any rank outside ``process_group``, which makes it safe under
    DP × TP. Waits may last as long as those in ``process_group``: who is late to one, as after a checkpoint, is late to
    both.

    Args:
        process_group: whose ranks.
        purpose: what they come for, as an error says it.

    Attributes:
        rank, size: this rank within the group, and how many there are.
        time_limit: of every wait.
        store: what they share.
    """

    _num_made: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(self, process_group: ProcessGroup, purpose: str) -> None:
        ranks = tuple(group_ranks(process_group))
        self.rank, self.size, self.time_limit = group_rank(process_group), len(ranks), time_limit(process_group)
        self._purpose = purpose
        name = f"zeroresize, to {purpose}/{'-'.join(map(str, ranks))}/{self._num_made[purpose, ranks]}"
        self._num_made[purpose, ranks] += 1
        self.store: Any = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def exchange(self, where: str, message: str = "") -> list[str]:
        """Leave a message and wait for those of all ranks.

        Args:
            where: the name of this exchange, used once.

        Raises:
            RuntimeError: if not all ranks come within the time limit, naming those that did not.
        """
        keys = [f"{where}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], message)
            self.store.wait(keys, self.time_limit)
            return [self.store.get(key).decode() for key in keys]
        except Exception as error:
            raise RuntimeError(
                f"{self._missing(keys)} did not come to {self._purpose} within "
                f"{self.time_limit.total_seconds():g} s, the time limit of their process group (timeout=... where it "
                "is made): they may have died, or do something longer, such as writing a checkpoint"
            ) from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except Exception:
            return "the job's store cannot be reached: the process that keeps it, usually rank 0's, or other ranks"
        return f"ranks {missing} of the group"
