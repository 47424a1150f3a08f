"""A stage is done with a layer in a step when backward of the last micro-batch is over: its gradients are final."""

from __future__ import annotations

from collections import Counter
from functools import partial
from threading import Event
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroresize.pipeline.layer_backwards import LayerBackwards
from zeroresize.pipeline.pipeline import Pipeline


class FinishedLayers:
    """Watches within a ``with`` block when a stage is done with each layer; all are finished at its end.

    Args:
        num_steps: of the pipeline within the block.
    """

    def __init__(self, pipeline: Pipeline, num_steps: int) -> None:
        self._layers = {number: pipeline.layers[number] for number in pipeline.present}
        self._device, self._num_backwards = pipeline.device, num_steps * pipeline.num_microbatches
        self._backwards = LayerBackwards(self._passed)
        self._open, self._counts = set(self._layers), Counter[int]()
        self._finished = {number: Event() for number in self._layers}
        self._on_device: dict[int, torch.cuda.Event] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> FinishedLayers:
        for number, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(partial(self._after_forward, number)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for number in self._layers:
            self._finish(number)

    def wait(self, number: int) -> None:
        """Wait until this stage is done with a layer; on a GPU its current stream then waits for the device."""
        self._finished[number].wait()
        if number in self._on_device:
            self._on_device[number].wait()

    def _after_forward(self, number: int, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        self._backwards.watch(number, outputs)

    def _passed(self, ended: int | None, begun: int | None) -> None:
        """Backward is over for all layers behind the one where it goes on."""
        behind = {number for number in self._open if begun is None or number > begun}
        self._counts.update(behind)
        self._open -= behind
        for number in behind:
            if self._counts[number] == self._num_backwards:
                self._finish(number)
        if begun is None:
            self._open = set(self._layers)

    def _finish(self, number: int) -> None:
        if self._finished[number].is_set():
            return
        if self._device.type == "cuda":
            self._on_device[number] = torch.cuda.Event()
            self._on_device[number].record(torch.cuda.current_stream(self._device))
        self._finished[number].set()
