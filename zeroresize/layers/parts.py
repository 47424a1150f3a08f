"""Parts of a packed layer, such as q, k and v in one weight: each is divided over the ranks by itself.

A rank holds its r-th of every part, one part after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: An int is that many equal parts; a sequence holds the features of each part in the undivided layer.
Parts = int | Sequence[int]


def checked_parts(parts: Parts, size: int, num_ranks: int, whose: str) -> tuple[int, ...]:
    """Return the features of each part of an undivided layer that has ``size`` of them.

    Args:
        num_ranks: how many ranks divide each part.
        whose: what the error calls itself.

    Raises:
        ValueError: for parts that are not of the layer's size, or that the ranks do not divide.
    """
    sizes: tuple[int, ...] = ()
    if type(parts) is int:
        sizes = (size // parts,) * parts if parts > 0 else ()
    elif isinstance(parts, Sequence) and all(type(one) is int and one > 0 for one in parts):
        sizes = tuple(parts)
    if not sizes or sum(sizes) != size:
        raise ValueError(
            f"{whose}: parts={parts!r} is not allowed: wanted is how many equal parts the {size} features are, or the "
            f"features of each part, which sum up to {size}"
        )
    if indivisible := [one for one in sizes if one % num_ranks]:
        raise ValueError(
            f"{whose}: parts={parts!r}: a part of {indivisible[0]} features is not divisible by the {num_ranks} ranks"
        )
    return sizes


def part_of_rank(tensor: Tensor, dim: int, parts: Sequence[int], num_ranks: int, rank: int) -> Tensor:
    """Return what ``rank`` holds of the undivided ``tensor``, a copy: its share of each part along ``dim``."""
    shares = [part.chunk(num_ranks, dim)[rank] for part in tensor.detach().split(list(parts), dim)]
    return torch.cat(shares, dim)


def rows_of_unit(parts: Sequence[int], num_units: int) -> tuple[int, ...] | None:
    """Return how many rows one of ``num_units`` units has in each part; None if some part does not divide so."""
    if any(part < num_units or part % num_units for part in parts):
        return None
    return tuple(part // num_units for part in parts)


def equal_number(parts: Sequence[int]) -> int | None:
    """Return how many parts there are if all are equal, else None."""
    return len(parts) if len(set(parts)) == 1 else None
