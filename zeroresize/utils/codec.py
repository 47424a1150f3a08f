"""States as plain values, which any format of files holds, and back.

A state is a dataclass of numbers, texts, None, enums, NumPy arrays, tensors, and of tuples, lists, dictionaries and
dataclasses of such. Its annotations say what a saved state must be like, so all of it is checked before anything
changes. A field with the metadata :data:`UNSAVED` is no part of the state. A class may have a method
``after_loading``, which completes what was loaded, or raises ValueError where that does not fit.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

Decoded = TypeVar("Decoded")

#: Of whole states, of checkpoints and of telemetry: what has another one is not loaded.
FORMAT = 1
UNSAVED = {"unsaved": True}
_PLAIN = frozenset({int, float, bool, str, type(None)})
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def saved(state: Any) -> dict[str, Any]:
    """Return a whole state with the number of the format: two entries of a checkpoint, however much it holds."""
    return {"format": FORMAT, "state": (encoded(state),)}


def loaded(cls: type[Decoded], value: Any, where: str, known: Decoded | None = None) -> Decoded:
    """Return the state of which :func:`saved` made ``value``; arguments and errors are those of :func:`decoded`."""
    _require(isinstance(value, Mapping), "a mapping", value, where)
    require_format(value.get("format"), where)
    (state,) = _decoded(tuple[Any], value.get("state"), f"{where}.state", None)
    return decoded(cls, state, where, known)


def require_format(number: Any, where: str) -> None:
    """Raise ValueError unless ``number`` is that of the format."""
    _require(number == FORMAT, str(FORMAT), number, f"{where}.format")


def plain_value(stream: io.BytesIO, what: str) -> Any:
    """Return what ``torch.save`` wrote, if reading it runs no code."""
    import torch  # processes that plan need nothing of it

    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise whatever they come to
        raise ValueError(
            f"{what}: not read, since it is damaged or of a class whose reading could run code "
            f"({first_reason(error)}); classes that you trust are allowed by torch.serialization.add_safe_globals"
        ) from error


def first_reason(error: Exception) -> str:
    """Return the part of torch's long message that says what is not allowed."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line.partition(". Please")[0] for line in lines if "GLOBAL" in line]
    return next(iter(named or filter(None, lines)), type(error).__name__)


def encoded(value: Any) -> Any:
    """Return ``value`` as plain values and tensors."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        if _PLAIN.issuperset(map(type, value)):  # as long ones are
            return value if kind is tuple else list(value)
        return kind(map(encoded, value))
    if dataclasses.is_dataclass(kind):
        return {key: encoded(getattr(value, name)) for name, key, *_ in _fields(kind)}
    if isinstance(value, Mapping):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return tuple(map(encoded, sorted(value)))
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.value if isinstance(value, Enum) else value  # a tensor


def decoded(cls: type[Decoded], value: Any, where: str, known: Decoded | None = None) -> Decoded:
    """Return the dataclass of which :func:`encoded` made ``value``; lists may stand for tuples, as in JSON.

    Errors call it ``where``. What is not saved, and cannot be made, is as in the instance ``known``, which stays.
    """
    made: Decoded = _decoded(cls, value, where, known)
    return made


@functools.cache
def _fields(cls: Any) -> list[tuple[str, str, Any, bool]]:
    """Of each saved field its name, that in a state, what it holds, and whether a constructor takes it."""
    hints, of_state = get_type_hints(cls), (one for one in dataclasses.fields(cls) if _is_saved(one))
    return [(one.name, one.name.lstrip("_"), hints[one.name], one.init) for one in of_state]


@functools.cache
def _is_copied(cls: Any) -> bool:
    """Whether an instance has more than what is saved, and so must be known before."""
    return dataclasses.is_dataclass(cls) and any(one.init and not _is_saved(one) for one in dataclasses.fields(cls))


def _is_saved(field: dataclasses.Field[Any]) -> bool:
    return "unsaved" not in field.metadata


def _decoded(kind: Any, value: Any, where: str, known: Any) -> Any:
    origin, kinds = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        if value is None and type(None) in kinds:
            return None
        *others, last = (one for one in kinds if one is not type(None))
        for other in others:
            with suppress(ValueError):
                return _decoded(other, value, where, known)
        return _decoded(last, value, where, known)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where, known)
    if origin is np.ndarray:
        return _array(np.dtype(get_args(kinds[1])[0]), value, where)
    if origin in (tuple, list, frozenset):
        return origin(_items(kinds, value, where, known))
    if origin in (dict, Mapping):
        _require(isinstance(value, Mapping), "a mapping", value, where)
        if kinds[0] is int:  # of which JSON has made texts
            value = {int(key) if str(key).isdecimal() else key: item for key, item in value.items()}
        keys = [_decoded(kinds[0], key, f"the keys of {where}", None) for key in value]
        return {key: _decoded(kinds[1], value[key], f"{where}.{key}", None) for key in keys}
    if issubclass(kind, Enum):
        allowed = [member.value for member in kind]
        _require(value in allowed, f"one of {allowed}", value, where)
        return kind(value)
    is_number = isinstance(value, (int, float) if kind is float else kind)
    _require(is_number and (kind is bool or not isinstance(value, bool)), _NAMES.get(kind, "a tensor"), value, where)
    return value


def _dataclass(cls: Any, value: Any, where: str, known: Any) -> Any:
    _require(isinstance(value, Mapping), "a mapping", value, where)
    values: dict[str, Any] = {}
    for name, key, kind, _ in _fields(cls):
        if key not in value:
            raise ValueError(f"{where}.{key}: missing")
        values[name] = _decoded(kind, value[key], f"{where}.{key}", getattr(known, name, None))
    try:
        given = {} if _is_copied(cls) else {name: values.pop(name) for name, *_, is_given in _fields(cls) if is_given}
        made = copy.copy(known) if _is_copied(cls) else cls(**given)
        for name, item in values.items():
            object.__setattr__(made, name, item)
        if hasattr(made, "after_loading"):
            made.after_loading()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return made


def _items(kinds: tuple[Any, ...], value: Any, where: str, known: Any) -> list[Any]:
    _require(isinstance(value, list | tuple), "a list", value, where)
    knowns = [None] * len(value)
    if len(kinds) == 1 or kinds[1] is Ellipsis:
        if _is_copied(kinds[0]):
            knowns = known  # others cannot be made
        kinds = kinds[:1] * len(value)
    elif len(value) != len(kinds):
        raise ValueError(f"{where}: a list of {len(kinds)} is needed, here is one of {len(value)}")
    items = enumerate(zip(kinds, value, knowns, strict=False))
    return [_decoded(kind, item, f"{where}[{place}]", like) for place, (kind, item, like) in items]


def _array(dtype: np.dtype[Any], value: Any, where: str) -> Any:
    allowed, needed = ("i", "a list of whole numbers") if dtype.kind == "i" else ("if", "a list of numbers")
    try:
        array = np.array(_items((Any,), value, where, None))
    except ValueError:  # of rows of unequal lengths
        array = np.array(None)
    _require(not array.size or array.dtype.kind in allowed, needed, value, where)
    return array.astype(dtype)


def _require(fits: bool, needed: str, value: Any, where: str) -> None:
    if not fits:
        shown = repr(value)
        raise ValueError(f"{where}: {needed} is needed, found {shown if len(shown) <= 60 else shown[:60] + ' …'}")
