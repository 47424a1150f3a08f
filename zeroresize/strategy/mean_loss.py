"""The loss of a step from what its ranks have computed, each micro-batch on one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.comm.collectives import all_reduce, message_device
from zeroresize.plan.strategy import Position
from zeroresize.runtime.counted_loss import CountedLoss, require_counted
from zeroresize.strategy.model import SwitchableModel


def parts_of(loss: CountedLoss, mean: Tensor, position: Position) -> Tensor:
    """Return this rank's row for :func:`mean_over_ranks`, [3] of float64.

    Args:
        loss: of the micro-batches that have run here.
        mean: the sum of what it returned.
        position: of this rank; ranks that divide layers have computed the same, of which the first counts.
    """
    if position.shard:
        return torch.zeros(3, dtype=torch.float64)
    if position.replica == 0:
        loss.warn()
    return torch.tensor([float(mean), loss.counted, loss.num_unforeseen], dtype=torch.float64)


def mean_over_ranks(loss: CountedLoss, parts: Tensor, model: SwitchableModel) -> tuple[float, float]:
    """Return the mean over all that counts, and by what gradients are to be multiplied; collective.

    Args:
        parts: [3] of this rank.

    Raises:
        ValueError: on all ranks, where the loss tells that nothing counts.
    """
    parts = parts.to(message_device(model.process_group, model.device))
    all_reduce(parts, model.process_group)
    mean, counted, num_unforeseen = parts.tolist()
    factor = loss.total / require_counted(counted) if num_unforeseen else 1.0
    return mean * factor, factor
