"""How many bytes of tensors live at once, counted operation by operation: memory where no allocator tells."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
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
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _has_memory(tensor)}
        for tensor in tree_leaves(outputs):
            if _has_memory(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()

        def end(_: object) -> None:
            self.now -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, end)
        self.now += num_bytes
        self.most = max(self.most, self.now)


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
