"""How many bytes of tensors live at once, counted operation by operation: memory where no allocator tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zeroresize.utils.torch_private import DispatchMode, storage_id


class LiveBytes(DispatchMode):
    """Counts, within its block, the memory of tensors that operations have made since and that still live.

    Each operation passes Python, so what runs meanwhile takes much longer.

    Attributes:
        now: bytes.
        most: the most since :meth:`forget_most`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def forget_most(self) -> None:
        """Begin anew with what lives now."""
        self.most = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {storage_id(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(outputs):
            if storage_id(tensor) not in given and storage_id(tensor) not in self._known:
                self._add(tensor)
        return outputs

    def _add(self, tensor: torch.Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        num_bytes = storage.nbytes()

        def end(_: object) -> None:
            self.now -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, end)
        self.now += num_bytes
        self.most = max(self.most, self.now)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All of nested values that have memory."""
    if isinstance(values, torch.Tensor):
        if values.layout is torch.strided and not values.is_meta:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
