"""A short number that tells whether ranks hold the same, however much that is."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from typing import Any

from zeroresize.plan.group import Loan

#: Of marshal's format: the last in which equal values give equal bytes; later ones tell who else refers to a value.
_FORMAT = 2


def fingerprint(loans: Sequence[Sequence[Loan]], *values: object) -> float:
    """48 bits of a hash of loans and of plain values, exact as a float64.

    Args:
        loans: many of them, of few different divisions among receivers.
        values: numbers, texts, None, and lists, tuples and dictionaries of such.
    """
    seen: dict[int, bytes] = {}
    told = [[(one.owner, one.share, _of(one.receivers, seen), _of(one.parts, seen)) for one in own] for own in loans]
    return float(int.from_bytes(_digest((told, values))[:6], "big"))


def _of(numbers: tuple[float, ...], seen: dict[int, bytes]) -> bytes:
    """A digest, made once of what several loans share."""
    known = seen.get(id(numbers))
    if known is None:
        known = seen[id(numbers)] = _digest(numbers)
    return known


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(marshal.dumps(value, _FORMAT), digest_size=16).digest()
