"""Counts how much work blocks do in a step, for a balancer that is to know the mean of many steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class CountedBlocks:
    """Adds up the ``work`` of blocks over the micro-batches of a step, by hooks. Evaluation does not count.

    Args:
        blocks: modules with an attribute ``work``, a number.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._work: dict[nn.Module, float] = {}
        for block in blocks:
            self._work[block] = 0.0
            block.register_forward_hook(self._add)

    def __call__(self, layer: nn.Module) -> float:
        """Return the work of a layer since it was last asked for; 1 for anything but a block, as it never changes."""
        work = self._work.get(layer, 1.0)
        if layer in self._work:
            self._work[layer] = 0.0
        return work

    def _add(self, block: Any, inputs: Any, outputs: Any) -> None:
        if block.training:
            self._work[block] += block.work
