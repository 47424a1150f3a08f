"""Checks of single values; each raises ValueError with the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

#: Counts and seeds that fit into 32 bits: what is computed from them then fits into 64.
LARGEST_COUNT = 2**31 - 1


def plain(value: Any) -> Any:
    """Return numbers of numpy or torch, also in lists and tuples, as Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value)) if isinstance(value, tuple) else list(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def keep_plain(instance: Any) -> None:
    """Let a frozen dataclass hold :func:`plain` values of those that it was given."""
    for key, value in vars(instance).items():
        object.__setattr__(instance, key, plain(value))


def at_least(key: str, value: Any, least: int, most: int = LARGEST_COUNT, *, otherwise: str = "") -> None:
    """Check for a whole number from ``least`` to ``most``; errors say what may stand there ``otherwise``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        choices = f"a whole number of at least {least}{f', or {otherwise},' if otherwise else ''}"
        raise ValueError(f"{key}={value!r} is not allowed: {choices} is needed")
    if value > most:
        raise ValueError(f"{key}={value} is not allowed: {most} is the largest")


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number; True and False are none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def number(
    key: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    or_infinite: bool = False,
) -> None:
    """Check for a finite number within the given limits, or also for infinity."""
    if or_infinite and value == math.inf:
        return
    limits = [f"at least {least:g}"] if least is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"at most {most:g}"] if most is not None else []
    limits += [f"below {below:g}"] if below is not None else []
    fits = is_number(value) and (least is None or value >= least) and (above is None or value > above)
    if not (fits and (most is None or value <= most) and (below is None or value < below)):
        raise ValueError(f"{key}={value!r} is not allowed: a finite number {' and '.join(limits)} is needed")


def one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    """Check for one of ``allowed``."""
    if value is False and "off" in allowed:  # other YAML loaders read a bare `off` as false
        raise ValueError(f"{key}=False: write {key}: 'off' with quotes; allowed are {list(allowed)}")
    if value not in allowed:
        nearest = closest(value.lower(), allowed) if isinstance(value, str) else None
        hint = f" (did you mean {nearest!r}?)" if nearest else ""
        raise ValueError(f"{key}={value!r} is not allowed{hint}: choose one of {list(allowed)}")


def is_bool(key: str, value: Any) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is not allowed: true or false is needed")


def divides(key: str, size: int, by_key: str, by: int) -> None:
    """Check that ``size`` is a multiple of ``by``."""
    if size % by:
        raise ValueError(f"{key}={size} is not divisible by {by_key}={by}")


def known_keys(
    what: str, values: Any, known: Sequence[str], *, room: str = "", elsewhere: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Check that ``values`` is a mapping that has no key but those ``known``, and return it.

    ``what`` is how a message calls such a key, ``room`` the name of ``values`` in a larger mapping, as in ``room.a``;
    ``elsewhere`` are further keys that a wrong one may be meant for.
    """
    if not isinstance(values, Mapping):
        given = "nothing ({} is an empty one)" if values is None else type(values).__name__
        raise ValueError(f"expected a mapping of {what}s, found {given}: allowed are {list(known)}")
    prefix = f"{room}." if room else ""
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        full_names = {name.rpartition(".")[2]: name for name in elsewhere} | {name: prefix + name for name in known}
        meant = {key: full_names.get(closest(key, list(full_names)) or "") for key in unknown}
        named = ", ".join(
            f"'{prefix}{key}'" + (f" (did you mean '{name}'?)" if name else "") for key, name in meant.items()
        )
        raise ValueError(f"unknown {what} {named}: allowed are {[prefix + name for name in known]}")
    return values


def closest(key: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the name in ``known`` that ``key`` may be misspelt for; None if none is as alike as ``cutoff``."""
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=cutoff)), None)


def share_numbers(shares: Any, num_ranks: int | None = None, choices: str = "", *, call: str = "") -> tuple[float, ...]:
    """Check what a user gives as the shares of the ranks of a group, or to a function ``call``; return it as floats.

    There must be ``num_ranks``, unless the group is not known yet; ``choices`` are words allowed in their place.
    """
    shares = plain(shares)
    is_row = isinstance(shares, Sequence) and not isinstance(shares, str)
    is_sound = is_row and all(is_number(share) and 0.0 <= share < math.inf for share in shares) and any(shares)
    if not is_sound or num_ranks not in (None, len(shares)):
        count = "one number" if num_ranks is None else f"{num_ranks} numbers, one"
        given = f"{call}(shares={shares!r})" if call else f"shares={shares!r}"
        raise ValueError(
            f"{given} is not allowed: wanted are {choices}{count} for each rank of the group, none negative "
            f"and not all zero, such as {(2, *(1,) * ((num_ranks or 3) - 1))}"
        )
    return tuple(map(float, shares))
