"""How many bytes of activations a rank holds for backward: with its units, and besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroresize.layers.segment import OwnedSegment
from zeroresize.measure.saved_bytes import SavedBytes


class ActivationBytes:
    """Counts what autograd saves in one training forward of a model, by hooks that are there only until then.

    What is saved between a segment's first column-parallel layer and its row-parallel one is computed with units. The
    first forward of training after :meth:`count_next` counts, one micro-batch where gradients are accumulated.

    Nothing is counted of a forward that ``torch.compile`` has compiled, even in parts.

    Args:
        model: whose forward is called.
        segments: of the model.

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
        model = self._model
        self._handles = [
            model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for number, segment in enumerate(self._segments):
            *columns, row = segment.modules
            self._handles += [one.register_forward_hook(partial(self._enter, number)) for one in columns]
            self._handles.append(row.register_forward_hook(partial(self._leave, number), always_call=True))

    def forget(self) -> None:
        """Begin anew, as units have moved."""
        self.within = self.besides = 0

    def close(self) -> None:
        """Count no more; what was counted stays."""
        if self._saved is not None:
            self._saved.end()
        self._saved = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, model: nn.Module, inputs: Any, named_inputs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if self._saved is None and torch.is_grad_enabled() and model.training:
            self._open.clear()
            self._saved = SavedBytes(model, (*inputs, *named_inputs.values()))

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        saved = self._saved
        if saved is None:
            return
        self.close()
        if any(layer.is_compiled for segment in self._segments for layer in segment.modules):
            return
        self.within = max(self.within, saved.within)
        self.besides = max(self.besides, saved.total - saved.within)

    def _enter(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._open.add(number)
            self._mark()

    def _leave(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._open.discard(number)
            self._mark()

    def _mark(self) -> None:
        if self._saved is not None:
            self._saved.is_within = bool(self._open)
