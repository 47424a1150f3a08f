"""The loss of a step from what its ranks have computed, each micro-batch on one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.comm.collectives import all_reduce, message_device
from zeroresize.plan.strategy import Position
from zeroresize.runtime.counted_loss import CountedLoss, total_count
from zeroresize.strategy.model import SwitchableModel


def parts_of(loss: CountedLoss, mean: Tensor, position: Position) -> Tensor:
    """Return [3] for :func:`mean_over_ranks`: the sum ``mean`` of what ``loss`` has returned, and what it counted."""
    if position.shard:
        return torch.zeros(3, dtype=torch.float64)
    if position.replica == 0:
        loss.warn()
    return torch.tensor([float(mean), loss.counted, loss.num_unforeseen], dtype=torch.float64)


def mean_over_ranks(loss: CountedLoss, parts: Tensor, model: SwitchableModel) -> tuple[float, float]:
    """Return the mean over all that counts, and by what gradients are to be multiplied; collective.

    Raises:
        ValueError: on all ranks, where the loss tells that nothing counts.
    """
    parts = parts.to(message_device(model.process_group, model.device))
    all_reduce(parts, model.process_group)
    mean, counted, num_unforeseen = parts.tolist()
    factor = loss.total / total_count([counted]) if num_unforeseen else 1.0
    return mean * factor, factor
