"""A stage is done with a layer when backward of the last micro-batch is over: its gradients are final."""

from __future__ import annotations

from collections import Counter
from threading import Event
from typing import Any

import torch

from zeroresize.pipeline.layer_watchers import LayerWatcher
from zeroresize.pipeline.pipeline import Pipeline


class FinishedLayers(LayerWatcher):
    """Watches within a ``with`` block when a stage is done with each layer; all are finished at its end.

    Args:
        num_steps: of the pipeline within the block.
    """

    def __init__(self, pipeline: Pipeline, num_steps: int) -> None:
        super().__init__(pipeline.module.watchers)
        self._device, self._steps_left, self._num_microbatches = pipeline.device, num_steps, 0
        self._open, self._counts = set(pipeline.present), Counter[int]()
        self._finished = {number: Event() for number in pipeline.present}
        self._on_device: dict[int, torch.cuda.Event] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for number in self._finished:
            self._finish(number)

    def wait(self, number: int) -> None:
        """Wait until this stage is done with a layer; on a GPU its current stream then waits for the device."""
        self._finished[number].wait()
        if number in self._on_device:
            self._on_device[number].wait()

    def step_begins(self, num_microbatches: int) -> None:
        self._steps_left, self._num_microbatches = self._steps_left - 1, num_microbatches
        self._counts.clear()

    def backward_reaches(self, number: int | None) -> None:
        behind = {each for each in self._open if number is None or each > number}
        self._counts.update(behind)
        self._open -= behind
        for each in behind:
            if not self._steps_left and self._counts[each] == self._num_microbatches:
                self._finish(each)
        if number is None:
            self._open = set(self._finished)

    def _finish(self, number: int) -> None:
        if self._finished[number].is_set():
            return
        if self._device.type == "cuda":
            self._on_device[number] = torch.cuda.Event()
            self._on_device[number].record(torch.cuda.current_stream(self._device))
        self._finished[number].set()
