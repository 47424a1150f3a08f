"""Memory for what autograd keeps: it is reused once no tensor lies in it any more."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack


@dataclass(frozen=True, eq=False)
class _Memory:
    """Bytes, and the storage that was last put into them."""

    data: Tensor
    tenant: StorageWeakRef

    @property
    def is_free(self) -> bool:
        return bool(self.tenant.expired())

    @property
    def size(self) -> int:
        return self.data.numel()


class Pool:
    """Makes copies without an explicit end: each lives until the last tensor on its storage is gone.

    Only autograd knows when it is done with what a forward saved: backward may come twice (``retain_graph``) or never,
    and after checkpointing it uses what a recomputation saved, whose own node is gone by then. So each copy has its own
    storage in the pool's memory, and the memory is free when that storage is freed. There are never more memories than
    there were copies at one time, and none is larger than the largest copy.
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor``, contiguously, into the smallest memory that is free and large enough."""
        num_bytes = tensor.numel() * tensor.element_size()
        data = self._take(num_bytes, tensor.device)
        copied = from_dlpack(to_dlpack(data[:num_bytes])).view(tensor.dtype).view(tensor.shape)
        self._memories.append(_Memory(data, StorageWeakRef(copied.untyped_storage())))
        return copied.copy_(tensor)

    def clear(self) -> None:
        """Drop all memory; copies in use keep theirs."""
        self._memories.clear()

    @property
    def bytes_held(self) -> int:
        """Bytes of copies in use and of free memory."""
        return sum(memory.size for memory in self._memories)

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        """At least ``num_bytes``, which leave the pool.

        If no free memory is large enough, the largest free one is dropped and new memory is allocated.
        """
        free = [memory for memory in self._memories if memory.is_free and memory.data.device == device]
        free.sort(key=lambda memory: memory.size)
        place = bisect_left(free, num_bytes, key=lambda memory: memory.size)
        if place < len(free):
            self._memories.remove(free[place])
            return free[place].data
        if free:
            self._memories.remove(free.pop())  # freed before its successor is allocated
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
