"""Memory for what autograd keeps: it is used again once nothing that lies in it is left."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack


@dataclass(frozen=True, eq=False)
class _Memory:
    """Bytes, and the storage that was last made upon them."""

    data: Tensor
    tenant: StorageWeakRef

    @property
    def is_free(self) -> bool:
        return bool(self.tenant.expired())

    @property
    def size(self) -> int:
        return self.data.numel()


class Pool:
    """Copies whose end nobody tells: each lives until the last tensor upon its storage is gone.

    When a backward is done with what its forward saved, only autograd knows: it may come twice (``retain_graph``) or
    never, and after checkpointing it uses what a recomputation saved, whose own node is long gone. So a copy has a
    storage of its own upon memory of the pool, and the memory is free when that storage has ended. There are never more
    memories than there were copies at one time, and none is larger than the largest copy.
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """``tensor``, contiguous, in the smallest memory that is free and large enough."""
        num_bytes = tensor.numel() * tensor.element_size()
        data = self._take(num_bytes, tensor.device)
        copied = from_dlpack(to_dlpack(data[:num_bytes])).view(tensor.dtype).view(tensor.shape)
        self._memories.append(_Memory(data, StorageWeakRef(copied.untyped_storage())))
        return copied.copy_(tensor)

    def clear(self) -> None:
        """Keep no memory; copies that are in use keep theirs."""
        self._memories.clear()

    @property
    def bytes_held(self) -> int:
        """Of copies in use and of memory that waits for the next ones."""
        return sum(memory.size for memory in self._memories)

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        """At least so many bytes, which leave the pool; if no free memory has them, its largest makes room for them."""
        free = [memory for memory in self._memories if memory.is_free and memory.data.device == device]
        free.sort(key=lambda memory: memory.size)
        place = bisect_left(free, num_bytes, key=lambda memory: memory.size)
        if place < len(free):
            self._memories.remove(free[place])
            return free[place].data
        if free:
            self._memories.remove(free.pop())  # gone before its successor is there
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
