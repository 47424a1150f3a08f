"""What can be reached from objects, written down such that it can be compared, and put back."""

from __future__ import annotations

import array
import collections
import dis
import itertools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from zeroresize.utils.fingerprint import digest
from zeroresize.utils.torch_private import PREFIXES_OF_TRACING, version_of

#: Values that are looked at in a module at most.
_MOST_VALUES = 200_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_CONTAINERS = (dict, list, set, collections.deque)
_ARRAYS = (Tensor, np.ndarray, array.array, bytearray)
#: Bytes of an array, or of a tensor, up to which its contents are compared: a tensor's version tells most of it.
_MOST_BYTES, _MOST_BYTES_OF_TENSOR = 2**24, 2**12
_COUNTING = (itertools.count, itertools.cycle, types.GeneratorType)
_NAMESPACES = (types.SimpleNamespace, threading.local)
#: Their code is known to keep nothing of a user's.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "zeroresize"} - {"__main__"}


class KeepsStateError(TypeError):
    """Raised where a forward keeps something, or draws random numbers; the reason is its text."""


class HeldObjects:
    """Remembers what can be reached from some objects, and makes it so again.

    Args:
        with_arrays: whether numbers in arrays, and in tensors that are small, are remembered, too.

    Attributes:
        codes: holds the code of users' functions that ran.
    """

    def __init__(self, *, with_arrays: bool = True) -> None:
        self._with_arrays = with_arrays
        self._roots: list[tuple[str, Callable[[], Any]]] = []
        self._were: dict[str, Any] = {}
        #: Contents of everything that can be changed, by ``id``; the object is held, so that this is nobody else's.
        self._contents: dict[int, tuple[Any, Any]] = {}
        self.codes: set[types.CodeType] = set()
        self._stores: list[str] = []

    def add(self, path: str, root: nn.Module) -> None:
        """Remember what the attributes of ``root`` hold; ``path`` names it in :meth:`changed`."""
        self._add(path.rstrip(".") or type(root).__name__, lambda: root)
        kind = type(root)
        if library_of(kind.__module__) not in _LIBRARIES:
            for name in [name for name, one in vars(kind).items() if not callable(one) and not name.startswith("__")]:
                self._add(f"{kind.__name__}.{name}", partial(vars(kind).get, name))

    def on_call(self, frame: Any, event: str, _: Any) -> None:
        """Remember what a user's function that begins can reach besides its module; for ``sys.setprofile``."""
        code = frame.f_code
        if event != "call" or code in self.codes or library_of(frame.f_globals.get("__name__")) in _LIBRARIES:
            return
        self.codes.add(code)
        self._stores += _assigned_outside(code)
        for name in code.co_freevars:
            if name in frame.f_locals:
                self._add(name, partial(operator.itemgetter(0), (frame.f_locals[name],)))
        for name in code.co_names:
            global_value = frame.f_globals.get(name)
            if isinstance(global_value, types.ModuleType):
                for inner in code.co_names:
                    self._add(f"{name}.{inner}", partial(vars(global_value).get, inner))
            elif global_value is not None:
                self._add(name, partial(frame.f_globals.get, name))

    def changed(self) -> list[str]:
        """Name what is not as it was, and put it back as far as that can be done."""
        now: dict[str, Any] = {}
        for path, root in self._roots:
            _look(root(), path, now, {}, None)
        differing = [path for path in {**self._were, **now} if self._were.get(path, _look) != now.get(path, _look)]
        self.restore()
        return list(dict.fromkeys([*map(_shown, differing), *self._stores]))

    def restore(self) -> None:
        """Let everything hold what it held."""
        for container, contents in self._contents.values():
            if self._with_arrays or not isinstance(container, _ARRAYS):
                _refill(container, contents)

    def _add(self, path: str, root: Callable[[], Any]) -> None:
        self._roots.append((path, root))
        _look(root(), path, self._were, {}, self._contents)


def _look(
    value: Any, path: str, known: dict[str, Any], seen: dict[int, Any], contents: dict[int, tuple[Any, Any]] | None
) -> None:
    """Write down what ``value`` and everything in it is, by path, and copies of the contents of what can be changed."""
    if isinstance(value, _PLAIN):
        known[path] = value if value == value else repr(value)  # NaN
        return
    if len(seen) > _MOST_VALUES:
        raise KeepsStateError("it holds too much to be looked at")
    if id(value) in seen or isinstance(value, fx.Proxy):
        known[path] = id(value)
        return
    seen[id(value)] = value
    if isinstance(value, _ARRAYS):
        version = version_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0
        numbers = _numbers_of(value)
        known[path] = id(value), version, tuple(getattr(value, "shape", ())), numbers
        if contents is not None and numbers is not None:
            contents.setdefault(id(value), (value, _copied(value)))
    elif isinstance(value, random.Random):
        known[path] = value.getstate()
    elif isinstance(value, np.random.Generator):
        known[path] = repr(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        known[path] = repr(value.get_state(legacy=False))
    elif isinstance(value, torch.Generator):
        known[path] = value.get_state().numpy().tobytes()
    elif isinstance(value, _COUNTING):
        frame = getattr(value, "gi_frame", None)
        known[path] = repr(value) if frame is None else (frame.f_lasti, repr(value))
    else:
        known[path] = id(value)
        for name, inner in _inside(value, contents):
            _look(inner, f"{path}{name}", known, seen, contents)


def _inside(value: Any, contents: dict[int, tuple[Any, Any]] | None) -> list[tuple[str, Any]]:
    """Return what an object holds, by the end of its path; nothing for what is not looked into."""
    if isinstance(value, _CONTAINERS):
        if contents is not None:
            contents.setdefault(id(value), (value, value.copy()))
        if isinstance(value, dict):
            return [(f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{id(key)}]", one) for key, one in value.items()]
        if isinstance(value, set):
            return [(f"[{id(one) if not isinstance(one, _PLAIN) else one!r}]", one) for one in value]
        return [(f"[{number}]", one) for number, one in enumerate(value)]
    if isinstance(value, tuple | frozenset):
        return [(f"[{number}]", one) for number, one in enumerate(value)]
    if isinstance(value, type):
        return _of_class(value, contents)
    is_of_user = library_of(type(value).__module__) not in _LIBRARIES
    if isinstance(value, types.FunctionType) or not (isinstance(value, (nn.Module, *_NAMESPACES)) or is_of_user):
        return []
    kind: Any = type(value)
    inside = _of_class(kind, contents)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        if contents is not None:
            contents.setdefault(id(attributes), (attributes, attributes.copy()))
        inside += [
            (f".{name}", inner) for name, inner in attributes.items() if not str(name).startswith(PREFIXES_OF_TRACING)
        ]
    slots = {name: getattr(value, name) for name in _slots_of(kind) if hasattr(value, name)}
    if slots and contents is not None:
        contents.setdefault(id(value), (value, slots))
    return inside + [(f".{name}", one) for name, one in slots.items()]


def _of_class(kind: type, contents: dict[int, tuple[Any, Any]] | None) -> list[tuple[str, Any]]:
    """Return what a user's class holds itself; nothing for others."""
    if library_of(kind.__module__) in _LIBRARIES:
        return []
    held = {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }
    if held and contents is not None:
        contents.setdefault(id(kind), (kind, held))
    return [(f".{kind.__name__}.{name}", one) for name, one in held.items()]


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """Name the slots of a user's class."""
    names: list[str] = []
    for base in kind.__mro__:
        if library_of(base.__module__) not in _LIBRARIES:
            slots = vars(base).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if not name.startswith("__"))


def _numbers_of(value: Any) -> bytes | None:
    """Return what can be compared of an array's contents; None where they are too many or elsewhere."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" and not value.is_quantized
        if not is_plain or value.layout != torch.strided or value.nbytes > _MOST_BYTES_OF_TENSOR:
            return None
        return value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        if value.nbytes > _MOST_BYTES:
            return None
        return repr(value.tolist()).encode() if value.dtype.hasobject else digest(value.tobytes())
    return None if memoryview(value).nbytes > _MOST_BYTES else digest(memoryview(value))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value[:]


def _refill(container: Any, contents: Any) -> None:
    """Let a container, an array, a class or an object with slots hold what it held."""
    if isinstance(container, Tensor):
        if container.shape == contents.shape and not torch.equal(container.detach(), contents):
            with torch.no_grad():
                container.detach().copy_(contents)
        return
    if isinstance(container, np.ndarray):
        if container.shape == contents.shape and container.flags.writeable:
            container[...] = contents
        return
    if isinstance(container, array.array | bytearray):
        container[:] = contents
        return
    if isinstance(container, type) or not isinstance(container, _CONTAINERS):
        for name, was in contents.items():
            if getattr(container, name, _look) is not was:
                setattr(container, name, was)
        return
    is_same = len(container) == len(contents) and (
        all(key in container and container[key] is value for key, value in contents.items())
        if isinstance(container, dict)
        else container == contents
        if isinstance(container, set)
        else all(now is was for now, was in zip(container, contents, strict=True))
    )
    if not is_same:
        container.clear()
        container.extend(contents) if isinstance(container, list | collections.deque) else container.update(contents)


def _shown(path: str) -> str:
    """Return a path up to what holds the element that changed."""
    return path.partition("[")[0]


@lru_cache(maxsize=1024)
def _assigned_outside(code: types.CodeType) -> tuple[str, ...]:
    """Name the variables of outer functions and of the file that a function assigns to."""
    return tuple(
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_GLOBAL"
        or (instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars)
    )


def library_of(module_name: Any) -> str:
    """Return the first part of a module's name, such as ``"torch"``."""
    return str(module_name).partition(".")[0]
