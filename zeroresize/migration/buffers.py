"""Memory that migration reuses: taken by name, it does not grow from step to step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from zeroresize.comm.collectives import NamedWork
from zeroresize.migration.pool import Pool


class Buffers:
    """Keeps tensors by name for reuse. Taking one that is still being sent waits for it."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._sending: dict[int, list[NamedWork]] = {}
        self._held: dict[Hashable, tuple[Tensor, tuple[NamedWork, ...]]] = {}
        self._kept = Pool()

    def take(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor of ``shape``, uninitialised, with the dtype and device of ``like``.

        It is the same memory at every call with this name, until a call needs a larger one.
        """
        size = 1
        for length in shape:
            size *= length
        held = self._tensors.get(name)
        if held is not None:
            self._wait_for(held)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            with torch.inference_mode(False):  # it outlives the forward that asks first
                held = torch.empty(size, dtype=like.dtype, device=like.device)
            self._tensors[name] = held
        return held[:size].view(shape)

    def is_being_sent(self, tensor: Tensor, work: NamedWork) -> None:
        """Note that ``tensor``, taken from here, must not change before ``work`` is done."""
        self._sending.setdefault(tensor.untyped_storage().data_ptr(), []).append(work)

    def hold(self, name: Hashable, tensor: Tensor, works: Sequence[NamedWork]) -> None:
        """Keep ``tensor`` alive until ``works`` are done, after waiting for what this name held before.

        Nobody may change it meanwhile.
        """
        if name in self._held:
            for work in self._held.pop(name)[1]:
                work.wait()
        self._held[name] = tensor, tuple(works)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of ``tensor``, for as long as autograd or another holder needs it."""
        return self._kept.copy(tensor)

    def finish_sending(self) -> None:
        """Wait until all transfers are done; one that failed is not waited for again."""
        sending, held = self._sending, self._held
        self._sending, self._held = {}, {}
        for works in (*sending.values(), *(works for _, works in held.values())):
            for work in works:
                work.wait()

    def clear(self) -> None:
        """Give the memory back."""
        try:
            self.finish_sending()
        finally:
            self._tensors.clear()
            self._kept.clear()

    @property
    def bytes_held(self) -> int:
        tensors = (*self._tensors.values(), *(tensor for tensor, _ in self._held.values()))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + self._kept.bytes_held

    def _wait_for(self, tensor: Tensor) -> None:
        for work in self._sending.pop(tensor.untyped_storage().data_ptr(), ()):
            work.wait()
