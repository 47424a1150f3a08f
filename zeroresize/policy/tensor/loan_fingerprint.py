"""A short number that tells whether ranks hold the same, however much that is."""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

from zeroresize.plan.group import Loan
from zeroresize.utils import hashing

#: Of marshal's format: the last in which equal values give equal bytes; later ones tell who else refers to a value.
_FORMAT = 2


def fingerprint_of_loans(loans: Sequence[Sequence[Loan]], *values: object) -> float:
    """Return a fingerprint of loans and of plain values; see :func:`zeroresize.utils.hashing.fingerprint`.

    Args:
        loans: many of them, of few different divisions among receivers.
        values: numbers, texts, None, and lists, tuples and dictionaries of such.
    """
    seen: dict[int, bytes] = {}
    loan_contents = [
        [(loan.owner, loan.share, _of(loan.receivers, seen), _of(loan.parts, seen)) for loan in of_plan]
        for of_plan in loans
    ]
    content: Any = (loan_contents, values)
    return hashing.fingerprint(marshal.dumps(content, _FORMAT))


def _of(numbers: tuple[float, ...], seen: dict[int, bytes]) -> bytes:
    """A digest, made once of what several loans share."""
    known = seen.get(id(numbers))
    if known is None:
        known = seen[id(numbers)] = hashing.digest(marshal.dumps(numbers, _FORMAT))
    return known
