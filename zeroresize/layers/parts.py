"""Parts of a packed layer, such as q, k and v in one weight: each is divided over the ranks by itself.

A rank holds its r-th of every part, one part after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: An int is that many equal parts; a sequence holds the features of each part in the undivided layer.
Parts = int | Sequence[int]


def checked_parts(parts: Parts, size: int, num_shares: int, whose: str, shares: str = "ranks") -> tuple[int, ...]:
    """Return the features of each part of an undivided layer that has ``size`` of them.

    Args:
        num_shares: into how many equal shares each part is divided.
        whose: what the error calls itself.
        shares: what the error calls them.

    Raises:
        ValueError: for parts that are not of the layer's size, or that do not divide.
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
    if indivisible := [one for one in sizes if one % num_shares]:
        raise ValueError(
            f"{whose}: parts={parts!r}: a part of {indivisible[0]} features is not divisible by {num_shares} {shares}"
        )
    return sizes


def part_of_rank(tensor: Tensor, dim: int, parts: Sequence[int], num_ranks: int, rank: int) -> Tensor:
    """Return what ``rank`` holds of the undivided ``tensor``, a copy: its share of each part along ``dim``."""
    shares = [part.chunk(num_ranks, dim)[rank] for part in tensor.detach().split(list(parts), dim)]
    return torch.cat(shares, dim)
