"""What modules hold beside their parameters, and random states: remembered, compared and put back."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroresize.utils.torch_private import PREFIXES_OF_TRACING, version_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, set, collections.deque)
#: Elements up to which a tensor that is an attribute is copied, to be put back.
_MOST_COPIED = 4096
#: So many of what is kept an error names.
_MOST_NAMED = 4


class KeepsStateError(TypeError):
    """Raised where a forward keeps something, or draws random numbers; the reason is its text."""


class ModuleState:
    """Remembers the attributes of all modules in ``module``, with what lies in containers and in objects there."""

    def __init__(self, module: nn.Module) -> None:
        self._contents: dict[int, tuple[str, Any, Any]] = {}
        self._tensors: dict[int, tuple[str, Tensor, int, Tensor | None]] = {}
        for name, submodule in module.named_modules():
            attributes = vars(submodule)
            holder = name or type(submodule).__name__
            self._contents[id(attributes)] = holder, attributes, dict(attributes)
            for key, value in attributes.items():
                self._remember(value, f"{holder}.{key}", is_attribute=True)

    def changed(self) -> list[str]:
        """Name the attributes that are not as they were."""
        names: dict[str, None] = {}
        for path, held, was in self._contents.values():
            if held is not None and not _is_same(held, was):
                is_module = isinstance(held, dict) and "_parameters" in held
                names |= (
                    dict.fromkeys(f"{path}.{key}" for key in _changed_keys(held, was)) if is_module else {path: None}
                )
        for path, tensor, version, _ in self._tensors.values():
            if version_of(tensor) != version:
                names[path] = None
        return list(names)

    def restore(self) -> None:
        """Let everything hold what it held; of tensors, small ones that are attributes."""
        for _, held, was in self._contents.values():
            if not _is_same(held, was):
                held.clear()
                held.extend(was) if isinstance(held, list | collections.deque) else held.update(was)
        for _, tensor, version, copy in self._tensors.values():
            if copy is not None and version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(copy)

    def _remember(self, value: Any, path: str, *, is_attribute: bool) -> None:
        if id(value) in self._contents or isinstance(value, nn.Module):
            return
        if isinstance(value, Tensor):
            if is_attribute and not value.is_inference():
                copy = value.detach().clone() if value.numel() <= _MOST_COPIED else None
                self._tensors[id(value)] = path, value, version_of(value), copy
        elif isinstance(value, _CONTAINERS):
            self._contents[id(value)] = path, value, value.copy()
            for inner in list(value.values()) if isinstance(value, dict) else list(value):
                self._remember(inner, path, is_attribute=False)
        elif is_attribute and not isinstance(value, type) and not callable(value):
            inside = getattr(value, "__dict__", None)
            if isinstance(inside, dict):
                self._contents[id(inside)] = path, inside, inside.copy()


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Put back, when the block ends, what the modules in ``module`` hold."""
    state = ModuleState(module)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """Let every submodule's flag say ``training`` while the block lasts; None leaves what it says."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        for submodule, _ in before:
            submodule.training = submodule.training if training is None else training
        yield
    finally:
        for submodule, was in before:
            submodule.training = was


@contextmanager
def nothing_kept(module: nn.Module, *, but_for_attributes: bool = False) -> Iterator[None]:
    """Put back, when the block ends, what the modules in ``module`` hold, and random states."""
    state, random_before = ModuleState(module), _random_states(module)
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # what was kept says more
        error = raised
    finally:
        has_drawn = _random_states(module)[1] != random_before[1]
        _restore_random(random_before[0])
        kept = [] if but_for_attributes else state.changed()
        state.restore()
    if kept:
        raise KeepsStateError(f"its forward keeps something from call to call: {', '.join(kept[:_MOST_NAMED])}")
    if has_drawn:
        raise KeepsStateError("its forward draws random numbers")
    if error is not None:
        raise error


@contextmanager
def random_restored(module: nn.Module) -> Iterator[None]:
    """Put back, when the block ends, the generators that everybody shares: of Python, numpy, torch and its devices."""
    states, _ = _random_states(module)
    try:
        yield
    finally:
        _restore_random(states)


def _random_states(module: nn.Module) -> tuple[list[Any], tuple[Any, ...]]:
    """Return states of the generators that everybody shares, and the same such that they can be compared."""
    devices = list({parameter.device for parameter in module.parameters() if parameter.is_cuda})
    of_torch = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    of_numpy: Any = np.random.get_state()
    states = [random.getstate(), of_numpy, of_torch, devices]
    comparable = [part.tobytes() if isinstance(part, np.ndarray) else part for part in of_numpy]
    return states, (random.getstate(), comparable, *(state.numpy().tobytes() for state in of_torch))


def _restore_random(states: list[Any]) -> None:
    of_python, of_numpy, of_torch, devices = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch[0])
    for device, state in zip(devices, of_torch[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


def _is_same(held: Any, was: Any) -> bool:
    if len(held) != len(was):
        return False
    if isinstance(held, dict):
        return not _changed_keys(held, was)
    return held == was if isinstance(held, set) else all(map(_is_equal, held, was))


def _changed_keys(held: dict[Any, Any], was: dict[Any, Any]) -> list[Any]:
    """The keys whose values are others, but for those that tracing itself has added."""
    return [
        key
        for key in {**was, **held}
        if not str(key).startswith(PREFIXES_OF_TRACING)
        and (key not in was or key not in held or not _is_equal(held[key], was[key]))
    ]


def _is_equal(value: Any, other: Any) -> bool:
    return value is other or (type(value) in _PLAIN and type(other) is type(value) and bool(value == other))
