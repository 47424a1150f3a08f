"""Watchers are told what a stage's layers compute, forward and backward; the loss is watched as one more layer, L.

Autograd's graph knows no layers. But the gradient of a layer's output arrives when everything behind the layer has been
computed, and autograd runs nodes in the reverse order of their forward. So a layer's backward, with all that is
recomputed in it, lasts from the arrival of its output's gradient until that of the layer before, or until the end of
the stage's backward. Nodes that autograd runs out of that order, as those of graphs on several devices, count for a
neighbour. Messages belong to no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor


class LayerWatcher:
    """Is told within a ``with`` block; spans do not overlap, and layers that arrive meanwhile are watched, too.

    Of several watchers the first one is told first of an end, and last of a begin. Of a backward, a thread of autograd
    may tell.

    Args:
        watchers: ``pipeline.module.watchers``.
    """

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers

    def __enter__(self) -> Any:
        self._watchers.everyone.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._watchers.everyone.remove(self)

    def step_begins(self, num_microbatches: int) -> None:
        """Of training."""

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        """A layer's forward, with its inputs, or its backward, without."""

    def ends(self, number: int, is_forward: bool) -> None:
        """A layer's forward, also where it failed, or its backward."""

    def backward_reaches(self, number: int | None) -> None:
        """Backward of a micro-batch is over for all layers behind this one; for all layers if None."""


class Watchers:
    """Tells watchers what a stage computes.

    Attributes:
        everyone: who watches.
    """

    def __init__(self) -> None:
        self.everyone: list[LayerWatcher] = []
        self._now: int | None = None  # the layer whose backward is running

    def step_begins(self, num_microbatches: int) -> None:
        """Tell that a step begins."""
        self._now = None
        for watcher in self.everyone:
            watcher.step_begins(num_microbatches)

    def call(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Return what a layer returns, while it is watched."""
        if not self.everyone:
            return layer(*inputs)
        everyone = self.everyone[:]
        for watcher in reversed(everyone):
            watcher.begins(number, True, inputs)
        try:
            outputs = layer(*inputs)
        finally:
            for watcher in everyone:
                watcher.ends(number, True)
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._arrived, number))
        return outputs

    def backward_ends(self) -> None:
        """Tell that backward of a micro-batch is over on this stage."""
        self._pass_to(None)

    def _arrived(self, number: int, gradient: Tensor) -> None:
        """Of a layer's output: of several, the first one counts; nor does that of a layer that returns its input."""
        if self._now is None or number < self._now:
            self._pass_to(number)

    def _pass_to(self, number: int | None) -> None:
        ended, self._now = self._now, number
        for watcher in self.everyone:
            if ended is not None:
                watcher.ends(ended, False)
            watcher.backward_reaches(number)
        for watcher in reversed(self.everyone if number is not None else []):
            assert number is not None
            watcher.begins(number, False, ())
