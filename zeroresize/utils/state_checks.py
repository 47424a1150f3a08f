"""What a saved state must be like, told as data, so that all of it is checked before any of it is taken over.

A check is called with a value and with where it stands, and raises ValueError, naming that, where the two do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Check = Callable[[Any, str], None]


def anything(value: Any, where: str) -> None:
    """Allow every value."""


def any_number(value: Any, where: str) -> None:
    """Check for a number; NaN and infinity are allowed, too."""
    _require(_is_number(value), "a number", value, where)


def not_negative(value: Any, where: str) -> None:
    """Check for a finite number of at least 0."""
    _require(_is_number(value) and 0.0 <= value < math.inf, "a number of at least 0", value, where)


def share(value: Any, where: str) -> None:
    """Check for a number from 0 to 1."""
    _require(_is_number(value) and 0.0 <= value <= 1.0, "a number from 0 to 1", value, where)


def count(value: Any, where: str) -> None:
    """Check for a whole number of at least 0."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _require(is_whole and value >= 0, "a whole number of at least 0", value, where)


def below(limit: int) -> Check:
    """Return a check for a whole number from 0 to ``limit`` − 1."""

    def check(value: Any, where: str) -> None:
        count(value, where)
        _require(value < limit, f"a whole number below {limit}", value, where)

    return check


def flag(value: Any, where: str) -> None:
    """Check for true or false."""
    _require(isinstance(value, bool), "true or false", value, where)


def text(value: Any, where: str) -> None:
    """Check for a text."""
    _require(isinstance(value, str), "a text", value, where)


def tensor(shape: Sequence[int] | None = None) -> Check:
    """Return a check for a tensor, of that shape if one is given."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, Tensor), "a tensor", value, where)
        if shape is not None and value.shape != tuple(shape):
            raise ValueError(f"{where}: a tensor of shape {list(shape)} is needed, found {list(value.shape)}")

    return check


def optional(check: Check) -> Check:
    """Return a check for None, or for what ``check`` allows."""
    return lambda value, where: None if value is None else check(value, where)


def each(check_item: Check, length: int | None = None) -> Check:
    """Return a check for a list or tuple whose items ``check_item`` allows, of that length if one is given."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, list | tuple), "a list", value, where)
        if length is not None and len(value) != length:
            raise ValueError(f"{where}: a list of {length} is needed, found one of {len(value)}")
        for position, item in enumerate(value):
            check_item(item, f"{where}[{position}]")

    return check


def row(*checks: Check, least: int | None = None) -> Check:
    """Return a check for a list or tuple with a value for each of ``checks``, or for the first ``least`` at least."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, list | tuple), "a list", value, where)
        if not (len(checks) if least is None else least) <= len(value) <= len(checks):
            raise ValueError(f"{where}: a list of {len(checks)} is needed, found one of {len(value)}")
        for position, (item, check_item) in enumerate(zip(value, checks, strict=False)):
            check_item(item, f"{where}[{position}]")

    return check


def keyed(checks: Mapping[str, Check]) -> Check:
    """Return a check for a mapping that has the keys of ``checks``; what else it has is not looked at."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, Mapping), "a mapping", value, where)
        for key, check_value in checks.items():
            if key not in value:
                raise ValueError(f"{where}.{key}: missing")
            check_value(value[key], f"{where}.{key}")

    return check


def values(check_item: Check) -> Check:
    """Return a check for a mapping of texts to values that ``check_item`` allows."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, Mapping), "a mapping", value, where)
        for key, item in value.items():
            text(key, f"the keys of {where}")
            check_item(item, f"{where}.{key}")

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(fits: bool, needed: str, value: Any, where: str) -> None:
    if not fits:
        shown = repr(value)
        raise ValueError(f"{where}: {needed} is needed, found {shown if len(shown) <= 60 else shown[:60] + ' …'}")
