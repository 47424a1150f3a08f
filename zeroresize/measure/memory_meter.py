"""Bytes of tensors: what lives on a device, now and at most, and what autograd saves in forward for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from zeroresize.layers.segment import OwnedSegment
from zeroresize.utils.torch_private import DispatchMode, hooks_of_saved_tensors, leaves_of, plain_parts, storage_id
from zeroresize.utils.torch_state import remove_all


class MemoryMeter(Protocol):
    """Tells bytes since the meter was made."""

    def now(self) -> int:
        """Return the bytes that live now."""

    def most(self) -> int:
        """Return the most since :meth:`forget_most`."""

    def forget_most(self) -> None:
        """Begin anew with what lives now."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """Measure within a block what it allocates on a device: by the allocator of a GPU, else operation by operation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        yield _OfAllocator(device)
        return
    with LiveBytes() as live:
        yield live


class _OfAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        self.forget_most()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def forget_most(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class LiveBytes(DispatchMode):
    """Counts, within its block, the memory of tensors that operations have made since and that still live.

    Each operation passes Python, so what runs meanwhile takes much longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = self._most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def now(self) -> int:
        return self._now

    def most(self) -> int:
        return self._most

    def forget_most(self) -> None:
        self._most = self._now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {storage_id(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(outputs):
            if storage_id(tensor) not in given and storage_id(tensor) not in self._known:
                self._add(tensor)
        return outputs

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        num_bytes = storage.nbytes()

        def end(_: object) -> None:
            self._now -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, end)
        self._now += num_bytes
        self._most = max(self._most, self._now)


def _tensors(values: Any) -> list[Tensor]:
    """All of nested values that have memory."""
    tensors = [value for value in leaves_of(values) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]


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
        pack_before, unpack = hooks_of_saved_tensors() or (Tensor.detach, lambda packed: packed)
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


def _memory_of(tensor: Tensor) -> int:
    """On the meta device, where there is none, the storage itself."""
    return storage_id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()


class ActivationBytes:
    """Counts what autograd saves in one training forward of a model, by hooks that are there only until then.

    What is saved between a segment's first column-parallel layer and its row-parallel one is computed with units. The
    first forward of training after :meth:`count_next` counts, one micro-batch where gradients are accumulated.

    Nothing is counted of a forward that ``torch.compile`` has compiled, even in parts.

    Attributes:
        within: bytes that are computed with this rank's units, the most that were counted since :meth:`forget`.
        besides: all others, likewise.
    """

    def __init__(self, model: nn.Module, segments: Sequence[OwnedSegment]) -> None:
        self._model, self._segments = model, segments
        self.within = self.besides = 0
        self._handles: list[RemovableHandle] = []
        self._saved: SavedBytes | None = None
        self._open: set[int] = set()

    def count_next(self) -> None:
        """Count in the next training forward."""
        if self._handles:
            return
        self._handles = [
            self._model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        ]
        for number, segment in enumerate(self._segments):
            *columns, row = segment.modules
            enter, leave = partial(self._pass, number, True), partial(self._pass, number, False)
            self._handles += [column.register_forward_hook(enter) for column in columns]
            self._handles.append(row.register_forward_hook(leave, always_call=True))

    def forget(self) -> None:
        """Begin anew, as units have moved."""
        self.within = self.besides = 0

    def close(self) -> None:
        """Count no more; what was counted stays."""
        if self._saved is not None:
            self._saved.end()
        self._saved = None
        remove_all(self._handles)
        self._handles = []

    def _begin(self, model: nn.Module, inputs: Any, named_inputs: Mapping[str, Any]) -> None:
        is_training = torch.is_grad_enabled() and model.training and not torch.compiler.is_compiling()
        if self._saved is None and is_training:
            self._open.clear()
            self._saved = SavedBytes(model, (*inputs, *named_inputs.values()))

    def _pass(self, number: int, enters: bool, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._saved is not None and not torch.compiler.is_compiling():
            (self._open.add if enters else self._open.discard)(number)
            self._saved.is_within = bool(self._open)

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        saved = self._saved
        if saved is None or torch.compiler.is_compiling():
            return
        self.close()
        if not any(layer.is_compiled for segment in self._segments for layer in segment.modules):
            self.within = max(self.within, saved.within)
            self.besides = max(self.besides, saved.total - saved.within)
