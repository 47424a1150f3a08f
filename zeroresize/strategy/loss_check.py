"""Whether a loss averages over the tokens where it must sum: then long and short micro-batches weigh alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from zeroresize.strategy.packed import Packed

#: Of ln V, what an untrained model's mean loss of a token is: a loss below that share is looked at.
_FAR_BELOW = 0.5
#: Two halves' losses sum to the whole's for a sum, and to twice as much for an average.
_HALVES_OF_AVERAGE = 1.5
_FEWEST_TOKENS = 4


def averages(loss: Callable[[Tensor, Packed], Tensor], output: Tensor, packed: Packed, value: Tensor) -> bool | None:
    """Whether ``value``, ``loss`` of a micro-batch, is an average over its tokens.

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
    found = []
    for begin, stop in ((0, middle), (middle, end)):
        bounds = sorted({begin, stop, *(start for start in packed.starts if begin < start < stop)})
        lengths = tuple(after - before for before, after in itertools.pairwise(bounds))
        found.append((output[begin:stop], Packed(packed.tokens[begin:stop], packed.targets[begin:stop], lengths)))
    return found
