"""The sum of gradients over the replicas of the home strategy, before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroresize.comm.collectives import group_size, start_all_reduce
from zeroresize.strategy.switching.placement import Placement
from zeroresize.strategy.switching.sharding import WholeTensor

#: Small gradients are summed together, up to so many bytes.
_BUCKET_BYTES = 32 * 2**20


def sum_gradients(home: Placement, tensors: Sequence[WholeTensor]) -> None:
    """Sum the gradients over the data-parallel group, in place; collective over it.

    A parameter without a gradient counts as one with zeros. Divided and undivided tensors are summed apart: undivided
    ones, which the ranks of a tensor-parallel group all hold, then lie in the same places of equal messages on all of
    them, and stay the same to the last bit.

    Raises:
        RuntimeError: if a rank does not come.
    """
    group = home.groups.dp
    if home.position is None or group_size(group) == 1:
        return
    gradients: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for number, parameter in home.parameters.items():
        if parameter.requires_grad:
            known = parameter.grad
            parameter.grad = torch.zeros_like(parameter) if known is None else known.contiguous()
            kind = parameter.dtype, tensors[number].spec.division is None
            gradients.setdefault(kind, []).append(parameter.grad)
    under_way = []
    for bucket in (one for alike in gradients.values() for one in _buckets(alike)):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([one.reshape(-1) for one in bucket])
        under_way.append((bucket, flat, start_all_reduce(flat, group)))
    for bucket, flat, work in under_way:
        if work is not None:
            work.wait()
        if len(bucket) > 1:
            for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    size = _BUCKET_BYTES
    for one in gradients:
        own = one.numel() * one.element_size()
        if size + own > _BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(one)
        size += own
    return found
