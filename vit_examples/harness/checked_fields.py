"""Sections of a configuration that are checked by the annotations of their fields.

A field's type says what it takes: a ``Literal`` one of its words, a tuple a list of the same kind of values, ``| None``
nothing. ``Annotated`` adds checks that are called with the key and the value, and one :class:`Read` that makes what the
section keeps of what a user writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from vit_examples.harness.sections import LONGEST_TIMEOUT_S
from zeroresize.utils.value_checks import at_least, is_bool, number, one_of

Natural = Annotated[int, partial(at_least, least=0)]
Count = Annotated[int, partial(at_least, least=1)]
NonNegative = Annotated[float, partial(number, least=0.0)]
Positive = Annotated[float, partial(number, above=0.0)]
#: Seconds after which a message that does not come fails.
Timeout = Annotated[float, partial(number, above=0.0, most=LONGEST_TIMEOUT_S)]


@dataclass(frozen=True)
class Read:
    """Makes a section's value of a user's, or raises a ValueError, which then names the key."""

    read: Callable[[Any], Any]


class Section:
    """A base of frozen dataclasses whose fields check themselves; ``section`` is their name in a configuration.

    Raises:
        ValueError: when it is built, naming the key, the value and what is allowed.
    """

    section: ClassVar[str]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = checked(f"{self.section}.{field.name}", getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)


def checked(key: str, value: Any, hint: Any) -> Any:
    """``value`` as an annotation asks for it, lists as tuples; ValueError, naming the key, where it does not fit."""
    kind, *checks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        if value is None and len(kinds) < len(get_args(kind)):
            return None
        return checked(key, value, next((each for each in kinds if _is_meant(value, each)), kinds[0]))
    if get_origin(kind) is tuple and not _is_meant(value, kind):
        raise ValueError(f"{key}={value!r} is not allowed: a list is needed")
    for check in checks:
        if not isinstance(check, Read):
            check(key, value)
            continue
        try:
            return check.read(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    if get_origin(kind) is Literal:
        one_of(key, value, get_args(kind))
    elif get_origin(kind) is tuple:
        return tuple(checked(key, each, get_args(kind)[0]) for each in value)
    elif kind is bool:
        is_bool(key, value)
    elif kind is str and (not isinstance(value, str) or not value):
        raise ValueError(f"{key}={value!r} is not allowed: a text is needed")
    return value


def _is_meant(value: Any, kind: Any) -> bool:
    """Whether a value can be a word, a list, or neither, as this kind is."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return {Literal: isinstance(value, str), tuple: is_list}.get(get_origin(kind), not is_list)
