"""Follows a stage's backward from layer to layer.

Autograd's graph knows no layers. But the gradient of a layer's output arrives when everything behind the layer has been
computed, and autograd runs nodes in the reverse order of their forward. So a layer's backward lasts from the arrival of
its output's gradient until that of the layer before, or until the end of the stage's backward. Nodes that autograd runs
out of that order, as those of graphs on several devices, count for a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from zeroresize.utils.torch_private import call_at_end_of_backward


class LayerBackwards:
    """Calls a function whenever backward goes from one layer to the next.

    Args:
        passed: called with the layer whose backward ends, None at first, and the one whose backward begins, None at
            last; by autograd, so on its thread.
    """

    def __init__(self, passed: Callable[[int | None, int | None], None]) -> None:
        self._passed = passed
        self._now: int | None = None

    def watch(self, number: int, outputs: Any) -> None:
        """Follow a layer's backward from its outputs; the caller gives them after each forward of the layer."""
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._arrived, number))

    def _arrived(self, number: int, gradient: Tensor) -> None:
        """Of a layer's output: of several, the first one counts."""
        if self._now is None:
            call_at_end_of_backward(self._ended)
        elif self._now <= number:  # of another output, or of a layer that returns its input
            return
        before, self._now = self._now, number
        self._passed(before, number)

    def _ended(self) -> None:
        before, self._now = self._now, None
        self._passed(before, None)
