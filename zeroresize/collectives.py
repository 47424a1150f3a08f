"""Every collective of the package, in the field's terms, and the one place that knows torch's versions.

The all-reduces of the column-parallel dx and the row-parallel y stand inside the Functions of ``functional.py``, which
start them here, because one is overlapped and the other works in place on the product's own output.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def require_group(process_group: ProcessGroup | None) -> ProcessGroup:
    """``process_group`` itself.

    Raises:
        ValueError: if it is None, or this rank is not a member.
    """
    if process_group is None:
        raise ValueError("process_group=None is not allowed: name the tensor-parallel group explicitly")
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: pass the tensor-parallel group that it is in")
    return process_group


def group_size(process_group: ProcessGroup) -> int:
    return dist.get_world_size(process_group)


def world_size() -> int:
    """All ranks of the job, whatever group they are in."""
    return dist.get_world_size()


def group_rank(process_group: ProcessGroup) -> int:
    return dist.get_rank(process_group)


def group_ranks(process_group: ProcessGroup) -> list[int]:
    """The group's ranks, counted over the whole world."""
    return dist.get_process_group_ranks(process_group)


def same_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    """Whether two groups hold the same ranks in the same order."""
    return one is other or group_ranks(one) == group_ranks(other)


def all_reduce(tensor: Tensor, process_group: ProcessGroup) -> None:
    """Sum ``tensor`` over the group in place."""
    if group_size(process_group) > 1:
        dist.all_reduce(tensor, group=process_group)


def start_all_reduce(tensor: Tensor, process_group: ProcessGroup) -> dist.Work | None:
    """Start summing ``tensor`` over the group in place; None where there is nothing to wait for."""
    if group_size(process_group) == 1:
        return None
    return dist.all_reduce(tensor, group=process_group, async_op=True)


class NumbersGroup:
    """The ranks of a group once more, on CPU (gloo), for numbers: no device synchronisation, nothing in between the
    host's collectives.

    It meets through the default group's store under a name of its own. (``torch.distributed.new_group`` with local
    synchronisation derives the name from how many groups a rank knows, so it hangs where ranks know different ones.)
    Making it is collective over ``process_group`` only, which makes it safe under DP × TP.

    Args:
        process_group: whose ranks.
        agreement: what must be the same on all of them, by name.

    Raises:
        ValueError: on every rank, if the ranks do not agree, naming what differs and where.
        RuntimeError: if not all ranks come within ``MEETING_S`` seconds.
    """

    MEETING_S = 300.0
    _num_made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, process_group: ProcessGroup, agreement: Mapping[str, str]) -> None:
        ranks = tuple(group_ranks(process_group))
        self.rank, self.size = group_rank(process_group), len(ranks)
        name = f"zeroresize/{'-'.join(map(str, ranks))}/{self._num_made[ranks]}"
        self._num_made[ranks] += 1
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._num_agreements = 0
        self.require_agreement(agreement)
        # A process that ends with gloo's threads alive can abort; dropping the group, also at exit, ends them.
        self._gloo: list[Any] = [dist.ProcessGroupGloo(self._store, self.rank, self.size, dist.default_pg_timeout)]
        self.close = weakref.finalize(self, self._gloo.clear)
        self._meet("connected", "")  # nobody may leave again while others are still connecting

    def start_all_gather(self, parts: list[Tensor], tensor: Tensor) -> dist.Work:
        """Start filling ``parts`` with every rank's ``tensor``."""
        return self._gloo[0].allgather([parts], [tensor])

    def require_agreement(self, agreement: Mapping[str, str]) -> None:
        """Compare values by name; collective.

        Raises:
            ValueError: on every rank, if the ranks do not agree, naming what differs and where.
            RuntimeError: if not all ranks come within ``MEETING_S`` seconds.
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
            store.wait(keys, timedelta(seconds=self.MEETING_S))
        except Exception as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"ranks {missing} of the group did not come within {self.MEETING_S:g} s") from error
        return [store.get(key).decode() for key in keys]


def gather_from(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """All ranks' ``x`` side by side on the last dimension in forward, this rank's slice of the gradient in backward."""
    return x if group_size(process_group) == 1 else _GatherFrom.apply(x, process_group)


def scatter_to(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """This rank's slice of the last dimension in forward, all-gather of the gradient in backward."""
    return x if group_size(process_group) == 1 else _ScatterTo.apply(x, process_group)


def _all_gather_last_dim(x: Tensor, process_group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group_size(process_group))]
    dist.all_gather(parts, x, group=process_group)
    return torch.cat(parts, dim=-1)


def _own_slice_of_last_dim(x: Tensor, process_group: ProcessGroup) -> Tensor:
    return x.chunk(group_size(process_group), dim=-1)[group_rank(process_group)].contiguous()


class _GatherFrom(torch.autograd.Function):
    """y = [x_0 … x_(R−1)] on the last dimension; dx = this rank's slice of dy."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return _all_gather_last_dim(x, process_group)

    @staticmethod
    def backward(ctx, dy):
        return _own_slice_of_last_dim(dy, ctx.process_group), None


class _ScatterTo(torch.autograd.Function):
    """y = this rank's slice of x on the last dimension; dx = [dy_0 … dy_(R−1)]."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return _own_slice_of_last_dim(x, process_group)

    @staticmethod
    def backward(ctx, dy):
        return _all_gather_last_dim(dy, ctx.process_group), None
