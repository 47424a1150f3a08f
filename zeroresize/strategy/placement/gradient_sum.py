"""The sum of gradients over the replicas of the optimizer's strategy, before the optimizer's step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import NamedWork, group_size, start_all_reduce
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor

#: Small gradients are summed together, up to so many bytes.
_BUCKET_BYTES = 32 * 2**20
#: So many such sums are under way at most, each with a copy of its gradients.
_MOST_UNDER_WAY = 2


def sum_gradients(optimizer_placement: Placement, tensors: Sequence[WholeTensor]) -> None:
    """Sum the gradients over the data-parallel group, in place; collective over it.

    A parameter without a gradient counts as one with zeros. Divided and undivided tensors are summed apart: undivided
    ones, which the ranks of a tensor-parallel group all hold, then lie in the same places of equal messages on all of
    them. With Gloo, whose order of additions depends on these alone, they stay the same to the last bit; NCCL may add
    in another order in each group.

    Raises:
        RuntimeError: if a rank does not come.
    """
    group = optimizer_placement.groups.dp
    gradients: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for number, parameter in optimizer_placement.masters.items():
        if parameter.requires_grad:
            known = parameter.grad
            parameter.grad = torch.zeros_like(parameter) if known is None else known.contiguous()
            kind = parameter.dtype, tensors[number].spec.division is None
            gradients.setdefault(kind, []).append(parameter.grad)
    if optimizer_placement.position is None or group_size(group) == 1:
        return
    under_way: deque[_Sum] = deque()
    for bucket in (one for alike in gradients.values() for one in _buckets(alike)):
        if len(under_way) == _MOST_UNDER_WAY:
            under_way.popleft().finish()
        under_way.append(_Sum(bucket, group))
    while under_way:
        under_way.popleft().finish()


class _Sum:
    """Of a bucket of gradients, under way until it is finished."""

    def __init__(self, bucket: Sequence[Tensor], group: ProcessGroup) -> None:
        self._bucket = bucket
        self._flat = bucket[0] if len(bucket) == 1 else torch.cat([one.reshape(-1) for one in bucket])
        self._work: NamedWork | None = start_all_reduce(self._flat, group)

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        if len(self._bucket) > 1:
            parts = self._flat.split([one.numel() for one in self._bucket])
            for gradient, part in zip(self._bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = _BUCKET_BYTES
    for gradient in gradients:
        num_bytes = gradient.numel() * gradient.element_size()
        if size + num_bytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += num_bytes
    return buckets
