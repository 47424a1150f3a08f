"""No uneven shard gets into a file by accident: ``state_dict()`` is an error while units are away from home."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroresize.layers.segment import OwnedSegment

_HINT = (
    "which no other number of ranks, and no model that is not balanced, could load. Save with all units at home, "
    "`with balancer.at_home(): ...` on every rank of the group, or let torch.distributed.checkpoint save "
    "`zeroresize.sharded_state_dict(model)`, which holds any division"
)


def guard_modules(segments: Iterable[OwnedSegment]) -> None:
    """Let ``state_dict()`` of every module that holds a segment's parameters raise while units are away."""
    for segment in segments:
        for owner in {id(tensor.owner): tensor.owner for tensor in segment.tensors}.values():
            owner.register_state_dict_pre_hook(_raising(segment))


def guard_optimizer(optimizer: Any, are_away: Callable[[], bool]) -> Callable[[], None]:
    """Let the optimizer's ``state_dict()`` raise while units are away; returns what takes that back.

    Args:
        are_away: whether they are; the guard ends when its object does.
    """
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer):
        inner = getattr(inner, "optim", None)
        if inner is None:
            return lambda: None
    alive = weakref.WeakMethod(are_away)

    def check(_: Any) -> None:
        ask = alive()
        if ask is not None and ask():
            raise RuntimeError(f"optimizer.state_dict(): its state is of unevenly divided layers, {_HINT}")

    return inner.register_state_dict_pre_hook(check).remove


def _raising(segment: OwnedSegment) -> Callable[..., None]:
    def check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not segment.owned.is_even:
            counts = ", ".join(map(str, segment.owned.counts))
            raise RuntimeError(
                f"state_dict(): segment {segment.name} is divided unevenly ({counts} {segment.kind}), {_HINT}"
            )

    return check
