"""The times of each layer's forward and backward are watched by hooks that are there only while somebody watches.

**Forward** is the time between a layer's forward pre-hook and its forward hook.

**Backward** is followed from layer to layer by :mod:`~zeroresize.pipeline.layer_backwards`. Recomputing of activations
counts as backward.

The loss is watched as if it were one more layer, with the number L, behind the last one. Messages belong to no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroresize.pipeline.layer_backwards import LayerBackwards
from zeroresize.pipeline.pipeline import Pipeline

#: Is called with the number of a layer, and whether it is its forward.
SpanHook = Callable[[int, bool], object]


class LayerTiming:
    """Calls ``begins`` and ``ends`` around what layers of this rank compute within a ``with`` block.

    Spans do not overlap. Layers that arrive within the block are watched, too. Of several watchers, the first one is
    called first at an end.

    Args:
        pipeline: whose layers are watched.
        begins, ends: given the layer's number, L for the loss, and whether it is a forward.
    """

    def __init__(self, pipeline: Pipeline, begins: SpanHook, ends: SpanHook) -> None:
        self._pipeline, self._begins, self._ends = pipeline, begins, ends
        self._begun: set[int] = set()
        self._backwards = LayerBackwards(self._backward_passed)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> LayerTiming:
        for number, module in enumerate([*self._pipeline.layers, self._pipeline.loss]):
            self._handles += [
                module.register_forward_pre_hook(partial(self._before_forward, number), prepend=True),
                module.register_forward_hook(partial(self._after_forward, number), always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begun.clear()

    def _before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        self._begun.add(number)
        self._begins(number, True)

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if number not in self._begun:
            return
        self._begun.discard(number)
        self._ends(number, True)
        self._backwards.watch(number, outputs)

    def _backward_passed(self, ended: int | None, begun: int | None) -> None:
        if not self._handles:  # nobody watches any more
            return
        if ended is not None:
            self._ends(ended, False)
        if begun is not None:
            self._begins(begun, False)
