"""Slowing whole layers of a pipeline's stage, and the loss, whatever they consist of."""

from __future__ import annotations

from typing import Any

from zeroresize.injection.delay import Delay, Delayed, Delays
from zeroresize.pipeline.layer_timing import LayerTiming
from zeroresize.pipeline.pipeline import Pipeline


class SlowStage(Delayed):
    """While active, whatever layers this rank runs take ``chi`` times as long, forward and backward.

    Enter it before a block is profiled: then the profile sees the slowness. A layer is held up by what it took, so one
    that waits for other ranks within is held up by its waits, too.

    Args:
        pipeline: the pipeline of which this rank is a stage. Layers that arrive by a move are slowed, those that have
            left are not.
        delays: how layers are delayed.
    """

    def __init__(self, pipeline: Pipeline, delays: Delays | None = None) -> None:
        super().__init__(delays)
        self._pipeline = pipeline
        self._spans = LayerTiming(pipeline, self._begins, self._ends)

    def __enter__(self) -> None:
        self._spans.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._spans.__exit__(*error)

    def _begins(self, number: int, is_forward: bool) -> None:
        self._delay.begins()

    def _ends(self, number: int, is_forward: bool) -> None:
        self._delay.ends((number, is_forward))

    @property
    def _delay(self) -> Delay:
        return self._delays.on(self._pipeline.device)
