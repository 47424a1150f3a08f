"""How lines and errors tell of ranks that differ, by what each of them has, and of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

#: So many ranks a text names one by one.
_MOST_NAMED = 8


class CauseTexts(NamedTuple):
    """What a rank's delay comes from, in a few words and in a sentence, and what to do next."""

    name: str
    sentence: str
    next_step: str


TEXTS_OF_CAUSES = {
    "products": CauseTexts("matrix products", "matrix products take longer", "check clocks and cooling of {node}"),
    "rest": CauseTexts("other computing", "other computing takes longer", "look for other programs on {node}"),
    "loader": CauseTexts(
        "its data loader", "it comes late to the model", "give it more loader workers or faster storage"
    ),
    "compute": CauseTexts("computing", "what it computes takes longer", "check clocks and other programs on {node}"),
    "link": CauseTexts("links", "waits are longer", "check the network of {node}"),
    "heat": CauseTexts("heat", "its GPU is throttled at {celsius:.0f} °C", "check the cooling of {node}"),
    "power": CauseTexts("power", "its GPU is throttled for power", "check power supply and limits of {node}"),
}
#: What a rank's delay comes from, in a few words.
CAUSES = {cause: texts.name for cause, texts in TEXTS_OF_CAUSES.items()}


def alike(values: Sequence[Any], ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Group the ranks whose values are equal, in the order of the first of each; NaN equals nothing."""
    groups: list[tuple[Any, list[int]]] = []
    for row, value in enumerate(values):
        rank = row if ranks is None else ranks[row]
        is_nan = isinstance(value, float) and math.isnan(value)
        known = next((group for other, group in groups if not is_nan and other == value), None)
        if known is None:
            groups.append((value, [rank]))
        else:
            known.append(rank)
    return [group for _, group in groups]


def minority(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks outside of the group that more than half of all ranks form; none where no group does."""
    largest = max(groups, key=len, default=[])
    num_ranks = sum(map(len, groups))
    if 2 * len(largest) <= num_ranks:
        return []
    return sorted(rank for group in groups if group is not largest for rank in group)


def at_fault(groups: Sequence[Sequence[int]]) -> str:
    """Return the end of an error that lists ``groups``: which ranks most others differ from; empty for equal halves."""
    few = minority(groups)
    return f" (most ranks agree: look at {named_ranks(few)})" if few else ""


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words: "rank 1", "ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", …" if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def by_rank(values: Sequence[Any], ranks: Sequence[int] | None = None) -> str:
    """Return what every rank has, ranks that have the same together: "ranks 0, 2: 'exact'; rank 1: 'off'"."""
    groups = alike(values, ranks)
    numbers = list(range(len(values)) if ranks is None else ranks)
    return "; ".join(f"{named_ranks(group)}: {values[numbers.index(group[0])]}" for group in groups)


def lists_by_rank(lists: Sequence[Sequence[str]]) -> str:
    """Return how many entries every rank has, and those that not all of them have; as :func:`by_rank`."""
    on_all = set.intersection(*map(set, lists))

    def described(entries: Sequence[str]) -> str:
        others = [entry for entry in entries if entry not in on_all]
        more = ", …" if len(others) > _MOST_NAMED else ""
        return f"{len(entries)}" + (f", not on all ranks: {', '.join(others[:_MOST_NAMED])}{more}" if others else "")

    descriptions = [described(entries) for entries in lists]
    if len(set(descriptions)) == 1:  # the same entries
        return f"the same {len(lists[0])} in different orders, {'; '.join(map(str, alike(lists)))}"
    return by_rank(descriptions)


def digits(value: float, count: int = 3) -> str:
    """Return a number with so many digits that count, and all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def size_text(amount: float, unit: str = "B") -> str:
    """Return bytes, or what ``unit`` says, in thousands, millions and so on: "38 MB", "1.2 TFLOP/s"."""
    power = max((at for at in range(5) if abs(amount) >= 999.5 * 1000 ** (at - 1)), default=0)
    return f"{digits(amount / 1000**power)} {('', 'k', 'M', 'G', 'T')[power]}{unit}"


def percent_text(share: float) -> str:
    """Return a share as whole per cent, for a line."""
    return f"{share:.0%}".replace("%", " %")


def duration_text(seconds: float) -> str:
    """Return how long something lasts, in the unit that a person would take: "19 µs", "12.4 s", "2 min 3 s"."""
    if math.isnan(seconds):
        return "?"
    if seconds < 0.0:
        return f"−{duration_text(-seconds)}"
    if 0.0 < seconds < 0.9995e-3:
        return f"{digits(1e6 * seconds)} µs"
    if seconds < 0.9995:
        return f"{digits(1e3 * seconds)} ms"
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
