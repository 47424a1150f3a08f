"""Checks of the keys that take words or numbers: ``ratio``, ``shares``, ``memory_limits`` and ``ranks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroresize.config.keys import MIGRATING_MODES, RANK_CHOICES, SHARE_CHOICES
from zeroresize.utils.value_checks import is_number, share_numbers


def checked_ratio(ratio: Any, mode: str) -> str | float:
    """``"auto"``, or the ratio as a float.

    Raises:
        ValueError: if it is neither, or not allowed in ``mode``.
    """
    if mode in MIGRATING_MODES:
        allowed = "'auto' or a number with 0 <= ratio <= 1"
    else:
        allowed = "'auto' or a number with 0 <= ratio < 1 (at 1 nothing would be computed)"
    if isinstance(ratio, str):
        if ratio != "auto":
            raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
        return ratio
    if not is_number(ratio) or not 0.0 <= ratio <= 1.0 or (ratio == 1.0 and mode not in MIGRATING_MODES):
        raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
    return float(ratio)


def checked_share_choice(shares: Any, num_ranks: int | None = None) -> str | tuple[float, ...]:
    """``"even"``, ``"auto"``, or one float for each rank, as they were given (their sum means nothing).

    Args:
        num_ranks: of the group, where it is known.

    Raises:
        ValueError: if they are none of these.
    """
    if isinstance(shares, str) and shares in SHARE_CHOICES:
        return shares
    return share_numbers(shares, num_ranks, "'even', 'auto', or ")


def checked_memory_limits(limits: Any, num_ranks: int | None = None) -> tuple[float, ...] | None:
    """None, or a number of bytes for each rank.

    Args:
        num_ranks: of the group, where it is known.

    Raises:
        ValueError: if they are neither.
    """
    if limits is None:
        return None
    if isinstance(limits, str) or not isinstance(limits, Sequence) or not limits:
        raise ValueError(
            f"memory_limits={limits!r} is not allowed: wanted is null, or a list of bytes, one number for each rank, "
            "such as [24e9, 12e9]"
        )
    for rank, limit in enumerate(limits):
        if not is_number(limit) or limit <= 0:
            raise ValueError(
                f"memory_limits[{rank}]={limit!r} is not allowed: a number of bytes is needed, such as 24e9"
            )
    if num_ranks is not None and len(limits) != num_ranks:
        raise ValueError(
            f"memory_limits={list(limits)}: numbers of bytes for {len(limits)} ranks, and the group has {num_ranks}"
        )
    return tuple(map(float, limits))


def checked_ranks(ranks: Any) -> str | tuple[int, ...]:
    """``"stragglers"``, ``"all"``, or different ranks counted within the group.

    Raises:
        ValueError: if they are none of these.
    """
    allowed = "'stragglers', 'all', or a list of different ranks counted within the group from 0"
    if isinstance(ranks, str):
        if ranks not in RANK_CHOICES:
            raise ValueError(f"ranks={ranks!r} is not allowed: {allowed}")
        return ranks
    if not isinstance(ranks, Sequence) or not ranks:
        raise ValueError(f"ranks={ranks!r} is not allowed: {allowed}")
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"ranks={list(ranks)} holds {rank!r}: {allowed}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks={list(ranks)} names a rank twice: {allowed}")
    return tuple(ranks)
