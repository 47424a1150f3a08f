"""The check of what a public constructor or function is given: kinds by its annotations, limits by the decorator."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Number
from typing import Any, Literal, TypeVar

from zeroresize.utils.value_checks import at_least, number, plain

_CallableT = TypeVar("_CallableT", bound=Callable[..., Any])

Limit = Callable[[str, Any], None]
Tell = Callable[[Mapping[str, Any], ValueError], object]


def integer(least: int, most: int = 2**63 - 1) -> Limit:
    """Return the limit of whole numbers from ``least`` to ``most``."""
    return functools.partial(at_least, least=least, most=most)


def real(**limits: Any) -> Limit:
    """Return the limit of numbers, as :func:`~zeroresize.utils.value_checks.number` takes it."""
    return functools.partial(number, **limits)


def checked(*, tell: Tell | None = None, **limits: Limit) -> Callable[[_CallableT], _CallableT]:
    """Return a decorator that checks the arguments of a function, or of a class's constructor, before it runs.

    Each value is to be of the kind that its annotation names: a class, None, a bool, a whole number, a number other
    than NaN, a text, a ``Literal``, something that can be called, or lists, tuples and mappings of these. The default
    of a parameter is always allowed, and so is what an annotation is only imported for type checkers for.

    Args:
        tell: called with all arguments, by name, and the error: lets other ranks know, where the call is collective.
        limits: by the name of the parameter, what is asked besides; of every entry of a list. Not asked for None.

    Raises:
        ValueError: by the decorated call, naming it, the parameter, the value and what is allowed.
    """

    def decorate(decorated: _CallableT) -> _CallableT:
        target: Any = decorated
        function = target.__init__ if inspect.isclass(target) else target
        signature = inspect.signature(function)

        @functools.cache
        def hints() -> dict[str, Any]:
            module = vars(sys.modules[target.__module__])
            names = ChainMap(module, vars(builtins), defaultdict(lambda: Any))
            annotated = ((name, each.annotation) for name, each in signature.parameters.items())
            return {name: eval(hint, {}, names) if isinstance(hint, str) else hint for name, hint in annotated}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                takes = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
                needed = inspect.Signature([each for each in takes if each.name != "self"])
                raise TypeError(f"{target.__name__}: {error}; it takes {needed}") from None
            try:
                for name, value in given.arguments.items():
                    parameter = signature.parameters[name]
                    is_free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                    is_default = type(value) is type(parameter.default) and value == parameter.default
                    if not is_free and not is_default:
                        given.arguments[name] = _checked(name, value, hints()[name], limits.get(name))
            except ValueError as error:
                described = ValueError(f"{target.__name__}: {error}")
                if tell is not None:
                    given.apply_defaults()
                    with suppress(Exception):  # as where the group itself is none: then the others wait
                        tell(given.arguments, described)
                raise described from None
            return function(*given.args, **given.kwargs)

        if function is target:
            return typing.cast(_CallableT, call)
        target.__init__ = call
        return decorated

    return decorate


def _checked(name: str, value: Any, hint: Any, limit: Limit | None) -> Any:
    """The value, or what it holds as plain numbers and lists where it is numpy's or torch's and those are wanted."""
    if not _fits(value, hint):
        value, given = plain(value), value
        if not _fits(value, hint):
            is_plain = isinstance(given, str | Number | list | tuple | dict | None)
            shown = textwrap.shorten(repr(given) if is_plain else _name_of(given), 80, placeholder=" …")
            raise ValueError(f"{name}={shown} is not allowed: {_described(hint)} is needed")
    if limit is not None and value is not None:
        is_row = isinstance(value, Sequence) and not isinstance(value, str) and hint is not Any
        for place, each in enumerate(value if is_row else [value]):
            limit(f"{name}[{place}]" if is_row else name, each)
    return value


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)


def _kind_of(hint: Any) -> Any:
    """The class that a hint names, without its arguments; of a type variable its bound."""
    return type(None) if hint is None else typing.get_origin(hint) or getattr(hint, "__bound__", None) or hint


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    kind = _kind_of(hint)
    entries: Any = value
    if kind in (int, float):
        return isinstance(entries, int if kind is int else int | float) and type(value) is not bool and value == value
    if getattr(kind, "_is_protocol", False):  # which no value tells of; a plain one is none
        return not isinstance(value, str | Number | None)
    if kind in (Any, inspect.Parameter.empty) or not inspect.isclass(kind):
        return True
    if kind.__name__ == "ProcessGroup" and value == -100:  # NON_GROUP_MEMBER: who needs the group says it
        return True
    if not isinstance(value, kind) and not (kind is tuple and isinstance(value, list)):  # files hold lists
        return False
    if issubclass(kind, Mapping) and arguments:
        return all(_fits(key, arguments[0]) and _fits(each, arguments[1]) for key, each in entries.items())
    if kind is tuple and arguments and Ellipsis not in arguments:
        return len(entries) == len(arguments) and all(map(_fits, entries, arguments))
    if issubclass(kind, Sequence) and arguments and not isinstance(value, str):
        are_alike = arguments[0] is int and set(map(type, entries)) == {int}  # seen faster than one by one
        return are_alike or all(_fits(each, arguments[0]) for each in entries)
    return not arguments or not isinstance(value, str)


_WORDS = {type(None): "None", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, arguments)))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    kind = _kind_of(hint)
    if kind is Callable:
        return "a function"
    entries = ", ".join(_described(each) for each in arguments if each is not Ellipsis)
    name = "a list" if kind in (tuple, Sequence, Iterable) else _name_of(kind)
    if name == "ProcessGroup":
        return "a process group (that of the job is None before init_process_group)"
    return _WORDS.get(kind, f"{name} (each {entries})" if entries else name)
