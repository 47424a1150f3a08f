"""Slowing whole layers of a pipeline's stage, and the loss, whatever they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroresize.injection.delay import Slowdown
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import LayerWatcher
from zeroresize.utils.checked import checked


@checked()
class SlowStage(LayerWatcher, Slowdown):
    """While active, layers that this rank runs, those that arrive, too, take ``chi`` times as long, in both directions.

    Enter it before a block is profiled: then the profile sees the slowness. A layer is held up by what it took, so one
    that waits for other ranks within is held up by its waits, too.
    """

    def __init__(self, model: Pipeline) -> None:
        Slowdown.__init__(self)
        LayerWatcher.__init__(self, model.module.watchers)
        self._pipeline = model

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        self.delay_on(self._pipeline.device).begins()

    def ends(self, number: int, is_forward: bool) -> None:
        self.delay_on(self._pipeline.device).ends((number, is_forward))
