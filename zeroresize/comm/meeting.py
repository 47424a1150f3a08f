"""Few numbers that every rank of a group gives at once, to decide together by all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: ``meet(*numbers)`` returns the numbers of every rank, in the order of the ranks; collective. A rank may give fewer
#: than another, as where it has failed: the rest counts as zeros.
Meet = Callable[..., Sequence[Sequence[float]]]
#: Sends numbers to every rank and returns those of every rank; all ranks give equally many.
Exchanging = Callable[[Sequence[float]], Sequence[Sequence[float]]]

#: How many numbers travel with their count, in one exchange.
_AT_ONCE = 4


def gather(values: Sequence[float], exchange: Exchanging) -> list[list[float]]:
    """Return the values of every rank, in the order of the ranks, however many each has; collective.

    Every exchange has one length on all ranks, also where they are at different places of a program: gloo ends the
    process if ranks send unequally many numbers.

    Raises:
        Exception: what ``exchange`` raises.
    """
    table = exchange([float(len(values)), *_padded(values[:_AT_ONCE], _AT_ONCE)])
    counts = [int(count) for count, *_ in table]
    num_left = max(counts) - _AT_ONCE
    rest = exchange(_padded(values[_AT_ONCE:], num_left)) if num_left > 0 else [[]] * len(table)
    return [[*row[1:], *further][:count] for row, further, count in zip(table, rest, counts, strict=True)]


def meet_by(exchange: Exchanging) -> Meet:
    """Return a :data:`Meet` by exchanges of equally many numbers."""

    def meet(*numbers: float) -> Sequence[Sequence[float]]:
        return [_padded(row, len(numbers)) for row in gather(numbers, exchange)]

    return meet


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]
