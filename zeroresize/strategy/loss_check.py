"""Whether a loss averages over the tokens where it must sum: then long and short micro-batches weigh alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_rank, message_device
from zeroresize.runtime.stage import Loss

logger = logging.getLogger(__name__)

#: Of ln V, what an untrained model's mean loss of a token is: a loss below that share is looked at.
_FAR_BELOW = 0.5
#: Two halves' losses sum to the whole's for a sum, and to twice as much for an average.
_HALVES_OF_AVERAGE = 1.5
_FEWEST_TOKENS = 4

#: Returns the two halves of a micro-batch: the last layer's output [tokens or rows, …, V] of each, and the half itself;
#: nothing where it has none, or where the output is of a shape that tells nothing.
Halves = Callable[[], Sequence[tuple[Tensor, Any]]]


class LossCheck:
    """A check that warns once, after the first step that trains, of a loss that averages.

    Args:
        loss: of a micro-batch, given the last layer's output and the micro-batch.
        process_group: of the job's ranks, of which only some compute the loss.
        device: of the model.
    """

    def __init__(self, loss: Loss, process_group: ProcessGroup, device: torch.device) -> None:
        self._loss, self._process_group, self._device = loss, process_group, device
        self._averages: bool | None = None  # once a micro-batch has told
        self._is_done = False

    @property
    def looks(self) -> bool:
        """Return whether the loss of a micro-batch can still tell anything: in the first step, until one has."""
        return self._averages is None and not self._is_done

    def look(self, value: Tensor, num_tokens: int, halves: Halves) -> None:
        """Look at the loss of a micro-batch in the first step, until one has told.

        Args:
            value: the loss of the whole micro-batch, a scalar.
            num_tokens: of the micro-batch that count in the loss.
            halves: called at most once, before this returns.
        """
        if self.looks:
            self._averages = averages(self._loss, value, num_tokens, halves)

    def warn_of_average(self, mean: float) -> None:
        """Warn on rank 0 if the loss averages on some rank; collective in the first call, nothing later.

        Args:
            mean: loss of a token in the first step.
        """
        if self._is_done:
            return
        self._is_done = True
        where = message_device(self._process_group, self._device)
        num_averaging = torch.tensor(float(self._averages or False), dtype=torch.float64, device=where)
        all_reduce(num_averaging, self._process_group)
        if num_averaging and group_rank(self._process_group) == 0:
            logger.warning(
                "the loss averages over the tokens of a micro-batch, where it must sum: the first loss of a token, "
                "%.3g, is far below ln(vocabulary), and gradients are as much too small, unevenly over the "
                "micro-batches. Use reduction='sum'",
                mean,
            )


def averages(loss: Loss, value: Tensor, num_tokens: int, halves: Halves) -> bool | None:
    """Return whether ``value``, ``loss`` of a micro-batch, is an average over its tokens.

    A trained model's loss may be small, too: so where it is far below ln V, the two halves of the micro-batch are
    looked at by themselves, without gradients.

    Args:
        num_tokens: of the micro-batch that count in the loss; very few tell nothing.
        halves: of the micro-batch.

    Returns:
        None where it cannot be told.
    """
    if num_tokens < _FEWEST_TOKENS:
        return None
    try:
        parts, total = list(halves()), float(value.detach())
        if not parts or parts[0][0].shape[-1] < 2:
            return None
        if not 0.0 < total / num_tokens < _FAR_BELOW * math.log(parts[0][0].shape[-1]):
            return False
        devices = [value.device] if value.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            return sum(float(loss(output.detach(), half)) for output, half in parts) > _HALVES_OF_AVERAGE * total
    except Exception:  # a loss that wants whole micro-batches tells nothing
        return None
