"""The two halves of a micro-batch of sequences one after another."""

from __future__ import annotations

import itertools

from torch import Tensor

from zeroresize.strategy.packed import Packed


def halves_of_packed(output: Tensor, packed: Packed) -> list[tuple[Tensor, Packed]]:
    """Return the tokens up to the middle and those behind it, with the outputs of each.

    Args:
        output: of the last layer, [T, V] with V classes.

    Returns:
        The outputs and the tokens of both halves; nothing for outputs of another shape.
    """
    middle, end = packed.num_tokens // 2, packed.num_tokens
    if output.dim() != 2 or len(output) != end or not middle:
        return []
    halves = []
    for begin, stop in ((0, middle), (middle, end)):
        bounds = sorted({begin, stop, *(start for start in packed.starts if begin < start < stop)})
        lengths = tuple(after - before for before, after in itertools.pairwise(bounds))
        halves.append((output[begin:stop], Packed(packed.tokens[begin:stop], packed.targets[begin:stop], lengths)))
    return halves
