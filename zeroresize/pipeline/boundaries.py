"""Which layers each stage of a pipeline has: stage ``s`` those from ``boundaries[s]`` up to ``boundaries[s + 1]``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def checked_boundaries(boundaries: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """``boundaries`` as a tuple.

    Raises:
        ValueError: if they do not divide ``num_layers`` layers over ``num_stages`` stages, at least one for each.
    """
    checked = tuple(int(one) for one in boundaries)
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot be divided over {num_stages} stages: each needs at least one")
    is_whole = len(checked) == num_stages + 1 and checked[0] == 0 and checked[-1] == num_layers
    if not is_whole or any(begin >= end for begin, end in pairwise(checked)):
        raise ValueError(
            f"boundaries {list(checked)} do not divide {num_layers} layers over {num_stages} stages: they must be "
            f"{num_stages + 1} rising whole numbers from 0 to {num_layers}, so that every stage has at least one layer"
        )
    return checked


def even_boundaries(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equally many layers on every stage; where that is impossible, one more on the first ones.

    Raises:
        ValueError: for fewer layers than stages.
    """
    size, rest = divmod(num_layers, num_stages)
    return checked_boundaries([s * size + min(s, rest) for s in range(num_stages + 1)], num_layers, num_stages)


def stages_of(boundaries: Sequence[int]) -> list[int]:
    """Each layer's stage [L]."""
    return [stage for stage, (begin, end) in enumerate(pairwise(boundaries)) for _ in range(begin, end)]
