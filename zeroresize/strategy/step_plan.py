"""Which strategies a mini-batch's sequences visit, and with which of them; from lengths alone, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.strategy.length_range import LengthRange, range_of
from zeroresize.strategy.strategy import Strategy
from zeroresize.utils.value_checks import at_least


@dataclass(frozen=True)
class Visit:
    """What one strategy trains in a step: the sequences of all ranges that it has.

    Attributes:
        up_to: of its ranges.
        members: numbers of the sequences.
        max_tokens: of a micro-batch.
    """

    strategy: Strategy
    up_to: tuple[int, ...]
    members: tuple[int, ...]
    max_tokens: int


def token_limits(max_tokens: int | Sequence[int], ranges: Sequence[LengthRange]) -> tuple[int, ...]:
    """Of a micro-batch of each range: one number for all of them, or one for each.

    Raises:
        ValueError: if there are not as many as ranges, or one is smaller than the longest sequence of its range.
    """
    limits = (max_tokens,) * len(ranges) if isinstance(max_tokens, int) else tuple(max_tokens)
    if len(limits) != len(ranges):
        raise ValueError(f"max_tokens={list(limits)}: one number is needed, or one for each of {len(ranges)} ranges")
    for limit, one in zip(limits, ranges, strict=True):
        at_least(f"max_tokens of the length range {one}", limit, one.up_to)
    return limits


def plan_visits(lengths: Sequence[int], ranges: Sequence[LengthRange], limits: Sequence[int]) -> list[Visit]:
    """One visit of each strategy that has sequences, in the order of the ranges; the others have nothing to do.

    Ranges of one strategy are one visit, with the largest of their limits.

    Args:
        lengths: of the mini-batch's sequences, in tokens.
        limits: tokens of a micro-batch of each range.

    Raises:
        ValueError: for a sequence that is longer than the last range, naming it.
    """
    members: dict[Strategy, list[int]] = {one.strategy: [] for one in ranges}
    for number, length in enumerate(lengths):
        try:
            members[ranges[range_of(ranges, length)].strategy].append(number)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from error
    return [
        Visit(
            strategy,
            tuple(one.up_to for one in ranges if one.strategy == strategy),
            tuple(own),
            max(limit for limit, one in zip(limits, ranges, strict=True) if one.strategy == strategy),
        )
        for strategy, own in members.items()
        if own
    ]
