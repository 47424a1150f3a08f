"""Errors that mean that memory has run out, by whomever they are raised, and what they say."""

from __future__ import annotations

import torch

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
    return str(error) or type(error).__name__
