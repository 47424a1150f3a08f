"""Whether a loss averages over the tokens where it must sum: then long and short micro-batches weigh alike."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_rank, message_device
from zeroresize.strategy.packed import Packed

logger = logging.getLogger(__name__)

#: Of ln V, what an untrained model's mean loss of a token is: a loss below that share is looked at.
_FAR_BELOW = 0.5
#: Two halves' losses sum to the whole's for a sum, and to twice as much for an average.
_HALVES_OF_AVERAGE = 1.5
_FEWEST_TOKENS = 4


class LossCheck:
    """A check that warns once, after the first step that trains, of a loss that averages.

    Args:
        loss: of a micro-batch, given the last layer's output [T, …] and the micro-batch.
        process_group: of the job's ranks, of which only some compute the loss.
        device: of the model.
    """

    def __init__(
        self, loss: Callable[[Tensor, Packed], Tensor], process_group: ProcessGroup, device: torch.device
    ) -> None:
        self._loss, self._process_group, self._device = loss, process_group, device
        self._averages: bool | None = None  # once a micro-batch has told
        self._is_done = False

    def look(self, output: Tensor, packed: Packed, value: Tensor) -> None:
        """Look at ``value``, the loss of a micro-batch in the first step, until one has told."""
        if self._averages is None and not self._is_done:
            self._averages = averages(self._loss, output, packed, value)

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


def averages(loss: Callable[[Tensor, Packed], Tensor], output: Tensor, packed: Packed, value: Tensor) -> bool | None:
    """Return whether ``value``, ``loss`` of a micro-batch, is an average over its tokens.

    A trained model's loss may be small, too: so where it is far below ln V, the two halves of the micro-batch are
    looked at by themselves, without gradients.

    Args:
        output: of the last layer, [T, V] with V classes; other shapes tell nothing, nor do very few tokens.

    Returns:
        None where it cannot be told.
    """
    num_tokens, per_token = packed.num_tokens, float(value.detach()) / packed.num_tokens
    if num_tokens < _FEWEST_TOKENS or output.dim() != 2 or len(output) != num_tokens or output.shape[1] < 2:
        return None
    if not 0.0 < per_token < _FAR_BELOW * math.log(output.shape[1]):
        return False
    devices = [output.device] if output.is_cuda else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            halves = [float(loss(part, own)) for part, own in _halves(output.detach(), packed)]
    except Exception:  # a loss that wants whole micro-batches tells nothing
        return None
    return sum(halves) > _HALVES_OF_AVERAGE * float(value.detach())


def _halves(output: Tensor, packed: Packed) -> list[tuple[Tensor, Packed]]:
    """The tokens up to the middle and those behind it, with the outputs of each."""
    middle, end = packed.num_tokens // 2, packed.num_tokens
    halves = []
    for begin, stop in ((0, middle), (middle, end)):
        bounds = sorted({begin, stop, *(start for start in packed.starts if begin < start < stop)})
        lengths = tuple(after - before for before, after in itertools.pairwise(bounds))
        halves.append((output[begin:stop], Packed(packed.tokens[begin:stop], packed.targets[begin:stop], lengths)))
    return halves
