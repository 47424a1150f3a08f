"""Which strategy trains sequences of which length."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroresize.plan.strategy import Strategy
from zeroresize.utils.value_checks import at_least, known_keys


@dataclass(frozen=True)
class LengthRange:
    """Describe sequences longer than the range before allows, up to ``up_to`` tokens, and who trains them.

    Attributes:
        max_tokens: that a micro-batch of one replica may have, as far as memory allows; None for what holds for all
            ranges.

    Raises:
        ValueError: if ``up_to`` is no whole number of at least 1, for a strategy of another kind than
            :meth:`Strategy.of` reads, and for ``max_tokens`` below ``up_to``.
    """

    up_to: int
    strategy: Strategy
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least("length range up_to", self.up_to, 1)
        object.__setattr__(self, "strategy", Strategy.of(self.strategy))
        if self.max_tokens is not None:
            at_least(f"max_tokens of the length range up to {self.up_to}", self.max_tokens, self.up_to)

    @classmethod
    def of(cls, value: Any) -> LengthRange:
        """Return a range, made from a range or from a mapping of the attributes' names, as YAML gives them.

        Raises:
            ValueError: for anything else, and as the class does.
        """
        if isinstance(value, LengthRange):
            return value
        entries = known_keys("length range key", value, ("up_to", "strategy", "max_tokens"))
        missing = [key for key in ("up_to", "strategy") if key not in entries]
        if missing:
            raise ValueError(f"length range {dict(entries)!r}: {missing} are missing")
        return cls(**entries)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`of` reads back."""
        more = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"up_to": self.up_to, "strategy": self.strategy.as_dict(), **more}

    def __str__(self) -> str:
        return f"up to {self.up_to}: {self.strategy}"


def as_ranges(values: Iterable[Any]) -> tuple[LengthRange, ...]:
    """Return ranges whose ``up_to`` rises, made of what :meth:`LengthRange.of` reads.

    Raises:
        ValueError: if there is none, or one does not begin behind the one before it.
    """
    ranges = tuple(LengthRange.of(value) for value in values)
    if not ranges:
        raise ValueError("no length range is given: at least one is needed")
    for before, after in itertools.pairwise(ranges):
        if after.up_to <= before.up_to:
            raise ValueError(
                f"length range {after} follows {before}: each range needs a larger up_to than the one before"
            )
    return ranges


def with_limits(ranges: Iterable[LengthRange], max_tokens: int | None) -> tuple[LengthRange, ...]:
    """Return the ranges with every ``max_tokens`` set.

    Where a range has none it is set to this one, or to ``up_to`` if that is None.

    Raises:
        ValueError: if it is smaller than the longest sequence of a range that says none.
    """
    return tuple(
        length_range
        if length_range.max_tokens is not None
        else replace(length_range, max_tokens=length_range.up_to if max_tokens is None else max_tokens)
        for length_range in ranges
    )


def lengths_by_range(ranges: Sequence[LengthRange], lengths: Iterable[int]) -> list[list[int]]:
    """Return the lengths in each range, [number of ranges] lists, in the order given.

    Raises:
        ValueError: as :func:`range_of` does.
    """
    groups: list[list[int]] = [[] for _ in ranges]
    for length in lengths:
        groups[range_of(ranges, length)].append(length)
    return groups


def range_of(ranges: Sequence[LengthRange], length: int) -> int:
    """Return the number of the range that a sequence of ``length`` tokens is in.

    Raises:
        ValueError: if it is longer than every range allows.
    """
    number = bisect.bisect_left([one.up_to for one in ranges], length)
    if number == len(ranges):
        raise ValueError(f"a sequence of {length} tokens is longer than the last length range: {ranges[-1]}")
    return number
