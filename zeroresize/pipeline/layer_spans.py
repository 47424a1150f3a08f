"""When each layer of a stage computes, forward and backward, by hooks that are there only while somebody watches.

**Forward** is the time between a layer's forward pre-hook and its forward hook.

**Backward** runs on autograd's graph, which knows no layers. The gradient of a layer's output arrives when everything
behind the layer has been computed, and autograd runs nodes in the reverse order of their forward. So a layer's backward
lasts from the arrival of its output's gradient until that of the layer before, or until the end of the stage's
backward. Recomputing of activations counts as backward. Nodes that autograd runs out of that order, as those of graphs
on several devices, count for a neighbour.

The loss is watched as if it were one more layer, with the number L, behind the last one. Messages belong to no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroresize.pipeline.pipeline import Pipeline

#: Of a layer, by its number, and whether it is its forward.
Told = Callable[[int, bool], object]


class LayerSpans:
    """Within a ``with`` block, calls ``begins`` and ``ends`` around what layers of this rank compute.

    Spans do not overlap. Layers that arrive within the block are watched, too. Of several watchers, the first one is
    called first at an end.

    Args:
        pipeline: whose layers are watched.
        begins, ends: given the layer's number, L for the loss, and whether it is a forward.
    """

    def __init__(self, pipeline: Pipeline, begins: Told, ends: Told) -> None:
        self._pipeline, self._begins, self._ends = pipeline, begins, ends
        self._begun: set[int] = set()
        self._backward_of: int | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> LayerSpans:
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
        self._handles, self._backward_of = [], None
        self._begun.clear()

    def _before_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        self._begun.add(number)
        self._begins(number, True)

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if number not in self._begun:
            return
        self._begun.discard(number)
        self._ends(number, True)
        for one in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.register_hook(partial(self._gradient_arrived, number))

    def _gradient_arrived(self, number: int, gradient: Tensor) -> None:
        """Of a layer's output: of several, the first one counts."""
        if not self._handles:  # nobody watches any more
            return
        if self._backward_of is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        elif self._backward_of <= number:  # of another output, or of a layer that returns its input
            return
        else:
            self._ends(self._backward_of, False)
        self._backward_of = number
        self._begins(number, False)

    def _backward_ended(self) -> None:
        if self._backward_of is not None:
            self._ends(self._backward_of, False)
        self._backward_of = None
