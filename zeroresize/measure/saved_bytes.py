"""How many bytes autograd saves in forward, for backward: the activations that are held until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroresize.utils.torch_private import hooks_of_saved_tensors, plain_parts, storage_id


class SavedBytes:
    """Counts the memory of the distinct tensors that autograd saves, from now on until :meth:`end`.

    Parameters and buffers of ``layer`` do not count. What activation checkpointing computes again in backward is not
    saved in forward, and does not count either. Hooks that are in force already, such as ``save_on_cpu``, still do what
    they do, and what they put elsewhere does not count.

    Attributes:
        total: bytes so far.
        is_within: whether what is saved now counts for ``within``, too.
        within: bytes that were saved while ``is_within`` was set.
    """

    def __init__(self, layer: nn.Module, inputs: Sequence[Any]) -> None:
        self.total, self.within, self.is_within = 0, 0, False
        held = (*layer.parameters(), *layer.buffers())
        self._seen = {_memory_of(part) for tensor in held for part in plain_parts(tensor)}
        # Of a tensor that was there before, such as a batch of which this is a micro-batch, only this part counts.
        given = [part for tensor in inputs if isinstance(tensor, Tensor) for part in plain_parts(tensor)]
        self._inputs = {_memory_of(part): part.nbytes for part in given}
        pack_before, unpack = hooks_of_saved_tensors() or (Tensor.detach, _itself)
        self._pack_before: Callable[[Tensor], Any] = pack_before
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self._pack, unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Count no more; the sums stay."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = None

    def _pack(self, tensor: Tensor) -> Any:
        packed = self._pack_before(tensor)
        stays = set(map(_memory_of, plain_parts(packed))) if isinstance(packed, Tensor) else ()
        for part in plain_parts(tensor):
            memory = _memory_of(part)
            if memory in stays and memory not in self._seen:
                self._seen.add(memory)
                num_bytes = self._inputs.get(memory, part.untyped_storage().nbytes())
                self.total += num_bytes
                self.within += num_bytes if self.is_within else 0
        return packed  # detached, as an output that is saved would else hold on to itself


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _memory_of(tensor: Tensor) -> int:
    """On the meta device, where there is none, the storage itself."""
    return storage_id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
