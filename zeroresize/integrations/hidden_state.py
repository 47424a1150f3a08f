"""What a forward does besides computing: state that it keeps from call to call, and random numbers that it draws.

A forward that counts its calls, fills a list or draws a number may compute something else the next time, whatever it
computed when it was looked at.
"""

from __future__ import annotations

import gc
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from zeroresize.integrations.held_objects import HeldObjects, KeepsStateError

#: So many of what is kept an error names.
_MOST_NAMED = 4


@dataclass
class ForwardWatch:
    """Watches a forward while it runs.

    Attributes:
        codes: holds the code of users' functions that have run.
        running: begins a block in which a forward runs. Elsewhere nothing is watched: every call of a function takes
            longer while it is.
    """

    codes: set[types.CodeType]
    running: Callable[[], AbstractContextManager[None]]


@contextmanager
def nothing_kept(module: nn.Module) -> Iterator[ForwardWatch]:
    """Put back, when the block ends, what ``module`` and the user's code that ran hold, and random states.

    Yields:
        What is to know when a forward runs.

    Raises:
        KeepsStateError: if something had changed.
    """
    watch = HeldObjects()
    for name, submodule in module.named_modules():
        watch.add(f"{name}." if name else "", submodule)
    random_before = _random_states(module)
    outer, collects = sys.getprofile(), gc.isenabled()
    if outer is not None and not callable(outer):
        raise KeepsStateError("a profiler is active, beside which it is not seen what a forward keeps")
    on_call = watch.on_call if outer is None else _both(watch.on_call, outer)

    @contextmanager
    def running() -> Iterator[None]:
        sys.setprofile(on_call)
        try:
            yield
        finally:
            sys.setprofile(outer)

    gc.disable()  # what it calls back is not the forward's
    error: Exception | None = None
    try:
        yield ForwardWatch(watch.codes, running)
    except Exception as raised:  # what was kept says more
        error = raised
    finally:
        if collects:
            gc.enable()
        random_after = _random_states(module)
        _restore_random(random_before)
        kept = watch.changed()
    if kept:
        raise KeepsStateError(f"its forward keeps something from call to call: {', '.join(kept[:_MOST_NAMED])}")
    if random_after[1] != random_before[1]:
        raise KeepsStateError("its forward draws random numbers")
    if error is not None:
        raise error


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Put back, when the block ends, what the modules in ``module`` hold; contents of tensors are not looked at."""
    watch = HeldObjects(with_arrays=False)
    for name, submodule in module.named_modules():
        watch.add(f"{name}." if name else "", submodule)
    try:
        yield
    finally:
        watch.restore()


@contextmanager
def random_restored(module: nn.Module) -> Iterator[None]:
    """Put back, when the block ends, the generators that everybody shares: of Python, numpy, torch and its devices."""
    states = _random_states(module)
    try:
        yield
    finally:
        _restore_random(states)


def _both(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., None]:
    """Make one function that calls two, for ``sys.setprofile``."""

    def called(*given: Any) -> None:
        first(*given)
        second(*given)

    return called


def _random_states(module: nn.Module) -> tuple[list[Any], tuple[Any, ...]]:
    """Return states of the generators that everybody shares, and the same such that they can be compared."""
    devices = list({one.device for one in module.parameters() if one.is_cuda})
    of_torch = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    of_numpy: Any = np.random.get_state()
    state = [random.getstate(), of_numpy, of_torch, devices]
    numpy_state = [one.tobytes() if isinstance(one, np.ndarray) else one for one in of_numpy]
    return state, (random.getstate(), numpy_state, *(one.numpy().tobytes() for one in of_torch))


def _restore_random(states: tuple[list[Any], tuple[Any, ...]]) -> None:
    of_python, of_numpy, of_torch, devices = states[0]
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch[0])
    for device, state in zip(devices, of_torch[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
