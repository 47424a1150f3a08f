"""Each layer's seconds and bytes in one iteration are measured.

Seconds of forward and backward are those of :mod:`~zeroresize.pipeline.layer_watchers`.

**Activations** are the distinct tensors that autograd saves in a layer's forward, without parameters and buffers. What
two neighbours both save counts for both, so the figures do not depend on which of them share a stage. What a layer
keeps in other ways, such as attributes, does not count.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import all_reduce
from zeroresize.measure.memory_meter import SavedBytes
from zeroresize.pipeline.layer_watchers import LayerWatcher
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile

#: Is given a layer's number and seconds of forward and backward, and returns other seconds.
Scale = Callable[[int, float, float], tuple[float, float]]
#: Of each layer.
_NUM_FIGURES = len(fields(LayerProfile))


class LayerProfiler(LayerWatcher):
    """Measures one iteration of a pipeline within a ``with`` block, but not the first one or after ``refresh``::

        with LayerProfiler(pipeline, optimizer) as profiler:
            pipeline.step(inputs, target=target)
        profile = profiler.gather()

    Args:
        pipeline: with layers as they are now.
        optimizer: whose state is counted; None for none.
        counts_activations: whether to count what autograd saves, a third of what measuring takes; else it is 0.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        counts_activations: bool = True,
    ) -> None:
        super().__init__(pipeline.module.watchers)
        self._pipeline, self._optimizer, self._counts_activations = pipeline, optimizer, counts_activations
        self._begun: list[_Mark] = []
        self._measured: list[tuple[int, bool, _Mark, _Mark]] = []  # layer, whether forward, begin, end
        self._saved: dict[int, SavedBytes] = {}

    def __enter__(self) -> LayerProfiler:
        self._boundaries = self._pipeline.boundaries
        self._begin = self._mark()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end = self._mark()
        super().__exit__(*error)
        self._bytes = {number: self._bytes_of(self._pipeline.layers[number]) for number in self._pipeline.present}

    def gather(self) -> PipelineProfile:
        """Return the profile of all stages on every rank; collective, after the block.

        Raises:
            RuntimeError: if a rank does not come.
        """
        stage_figures = torch.tensor(self.figures(), dtype=torch.float64, device=self._pipeline.meet_device)
        table = stage_figures.new_zeros(self._pipeline.num_stages, stage_figures.numel())
        table[self._pipeline.stage] = stage_figures
        all_reduce(table, self._pipeline.process_group)
        return self.profile_of(table.tolist())

    def figures(self, scale: Scale | None = None) -> list[float]:
        """Return this stage's figures after the block, equally many on all stages; see :meth:`profile_of`.

        They are seconds of the block and of the loss, then each layer's seconds of forward and backward, and its bytes
        of weights, gradients, optimizer state and activations; zeros fill the rest. On a GPU it waits
        until the device has come to the end of the block.

        Args:
            scale: changes the seconds of forward and backward of a layer, given its number; None leaves them.
        """
        loss = len(self._pipeline.layers)
        seconds_of = {number: [0.0, 0.0] for number in (*self._bytes, loss)}
        self._end.wait()
        for number, is_forward, begin, end in self._measured:
            if number in seconds_of:
                seconds_of[number][0 if is_forward else 1] += begin.seconds_until(end)
        most = max(stop - start for start, stop in itertools.pairwise(self._boundaries))
        stage_figures = [self._begin.seconds_until(self._end), sum(seconds_of[loss])]
        for number, sizes in self._bytes.items():
            saved = self._saved[number].total if number in self._saved else 0
            forward_s, backward_s = seconds_of[number]
            seconds = (forward_s, backward_s) if scale is None else scale(number, forward_s, backward_s)
            stage_figures += [*seconds, *map(float, sizes), float(saved)]
        return stage_figures + [0.0] * (2 + most * _NUM_FIGURES - len(stage_figures))

    def profile_of(self, figures: Sequence[Sequence[float]]) -> PipelineProfile:
        """Return the profile of which all stages [S] have given these :meth:`figures`."""
        layers = [
            LayerProfile(of_stage[begin], of_stage[begin + 1], *map(int, of_stage[begin + 2 : begin + _NUM_FIGURES]))
            for (start, stop), of_stage in zip(itertools.pairwise(self._boundaries), figures, strict=True)
            for begin in range(2, 2 + (stop - start) * _NUM_FIGURES, _NUM_FIGURES)
        ]
        stage_s = tuple(own[0] for own in figures)
        return PipelineProfile(tuple(layers), stage_s, self._boundaries, math.fsum(own[1] for own in figures))

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        if self._counts_activations and is_forward and number in self._pipeline.present and number not in self._saved:
            self._saved[number] = SavedBytes(self._pipeline.layers[number], inputs)  # of one micro-batch
        self._begun.append(self._mark())

    def ends(self, number: int, is_forward: bool) -> None:
        self._measured.append((number, is_forward, self._begun.pop(), self._mark()))
        if is_forward and number in self._saved:
            self._saved[number].end()

    def _mark(self) -> _Mark:
        return _Mark(self._pipeline.device)

    def _bytes_of(self, layer: nn.Module) -> tuple[int, int, int]:
        """Of weights, gradients and optimizer state."""
        parameters = list(layer.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        states = [] if self._optimizer is None else [self._optimizer.state.get(one, {}) for one in parameters]
        of_state = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        return _nbytes([*parameters, *layer.buffers()]), _nbytes(gradients), _nbytes(of_state)


class _Mark:
    """A moment: of the device's stream on a GPU, where nothing waits for it, of the clock elsewhere."""

    __slots__ = ("_event", "_now")

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._now = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._now = time.perf_counter()

    def wait(self) -> None:
        """Until a GPU has come to it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, other: _Mark) -> float:
        if self._event is not None and other._event is not None:
            return self._event.elapsed_time(other._event) / 1000.0
        return other._now - self._now


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
