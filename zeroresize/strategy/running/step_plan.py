"""Which strategies a mini-batch's sequences visit, and with which of them; from lengths alone, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.strategy.length_range import LengthRange, range_of
from zeroresize.strategy.strategy import Strategy


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


def plan_visits(lengths: Sequence[int], ranges: Sequence[LengthRange]) -> list[Visit]:
    """One visit of each strategy that has sequences, in the order of the ranges; the others have nothing to do.

    Ranges of one strategy are one visit, with the largest of their limits.

    Args:
        lengths: of the mini-batch's sequences, in tokens.
        ranges: all of them with ``max_tokens``.

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
            max(one.max_tokens or one.up_to for one in ranges if one.strategy == strategy),
        )
        for strategy, own in members.items()
        if own
    ]
