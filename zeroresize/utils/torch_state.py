"""What torch tells of itself: whether memory has run out, when a device is done, the bits of a tensor and the like."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize.utils.hashing import fingerprint

#: Tensors are searched for down to so many levels of containers.
_MOST_NESTED = 8
#: Of torch's allocator on the CPU, of C++, of the C library, and of threads, whose stacks are memory.
_TEXTS = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory has run out.

    On the CPU torch and its communication libraries raise plain RuntimeErrors, so that their texts count, too.
    """
    is_plain = isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in _TEXTS)
    return is_plain or isinstance(error, MemoryError | torch.OutOfMemoryError)


def reason(error: BaseException) -> str:
    """Return what an error says; of Python's MemoryError, which says nothing, that memory has run out."""
    if isinstance(error, MemoryError):
        return "out of memory" + (f": {error}" if str(error) else "")
    return f"KeyError: {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def known_device(key: str, device: torch.device | str | int) -> None:
    """Check for a device that torch knows."""
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{key}={device!r} is not allowed: {reason(error)}") from None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on ``device_type``; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_when_done(device: torch.device) -> float:
    """Return the clock's seconds (``time.perf_counter``), once a GPU has done all that it was given."""
    synchronize(device)
    return time.perf_counter()


def fingerprint_of_bits(tensor: Tensor) -> float:
    """Return a whole number of 52 bits, equal for tensors of the same bits."""
    return fingerprint(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def tensors_in(value: Any, level: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in mappings, sequences and dataclasses, nested or not."""
    if isinstance(value, Tensor):
        yield value
    elif level < _MOST_NESTED:
        parts: Iterable[Any] = value if isinstance(value, list | tuple) else ()
        if isinstance(value, Mapping):
            parts = value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in fields(value)]
        for part in parts:
            yield from tensors_in(part, level + 1)


def remove_all(handles: Iterable[Any]) -> None:
    """Take back hooks, by what registering them has returned."""
    for handle in handles:
        handle.remove()
