"""Measures a pipeline's layers: seconds and bytes of one block, the work of every block, and what measuring takes.

A block is what encloses the pipeline's steps for one step of the optimizer. Of blocks that are due, a
:class:`LayerProfiler` takes each layer's seconds, by what :mod:`~zeroresize.pipeline.stage_layers` tells, and bytes. In
all blocks a :class:`WorkCounter` counts work, where a user asks for it. :class:`Measuring` sends the figures to the
other stages over a group of their own, on CPU, so nothing of them waits for the pipeline's messages, nor they for them.
What was sent is waited for, never polled: all ranks get a profile at the end of the same later block. On a GPU the
figures are read one block late, when they are done, so the device is never waited for while it has nothing to do.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from statistics import fmean, median
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.pausing import Restraint
from zeroresize.comm.words import Call
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.links import measure_neighbour_links
from zeroresize.measure.memory_meter import SavedBytes
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.replicas import NUM_FIGURES, PipelineReplicas, layers_of
from zeroresize.pipeline.stage_layers import LayerWatcher
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import PipelineMessages
from zeroresize.policy.pipeline.profile_cadence import ProfileCadence, SpentSeconds, profile_cost
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.resharding.agreement import meet_over
from zeroresize.utils.checked import checked
from zeroresize.utils.torch_state import remove_all

logger = logging.getLogger(__name__)

#: Is given a layer's number and seconds of forward and backward, and returns other seconds.
Scale = Callable[[int, float, float], tuple[float, float]]
#: How much a layer did in the block that is over, in any unit; or "tokens" for :class:`GivenRows`.
CountWork = Callable[[nn.Module], float] | Literal["tokens"]

_NUM_SPENT = len(fields(SpentSeconds))
#: The mean work of fewer blocks takes in those before the last profile.
_LEAST_COUNTED = 8
#: Of so many blocks the middle one is usual; fewer than the second number tell nothing.
_REMEMBERED, _LEAST_USUAL = 15, 3
#: Of so many measurements of a link the middle one counts: what varies from one to the next moves nothing.
_REMEMBERED_LINKS = 5
#: Smaller messages are measured as if they had so many bytes, as a link's bandwidth cannot be told by less.
_LEAST_BYTES = 2**12


@checked()
class LayerProfiler(LayerWatcher):
    """Measures one iteration of a pipeline within a ``with`` block, but not the first one or after ``refresh``::

        with LayerProfiler(pipeline, optimizer) as profiler:
            pipeline.step(inputs, target=target)
        profile = profiler.gather()

    Activations are the distinct tensors that autograd saves in a layer's forward, without parameters and buffers. What
    two neighbours both save counts for both, so the figures do not depend on which of them share a stage. What a layer
    keeps in other ways, such as attributes, does not count.

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
        self._clock = clock_for(pipeline.device)
        self._begun: list[Any] = []
        self._measured: list[tuple[int, bool, Any, Any]] = []  # layer, whether forward, begin, end
        self._saved: dict[int, SavedBytes] = {}

    def __enter__(self) -> LayerProfiler:
        self._boundaries = self._pipeline.boundaries
        self._begin = self._clock.mark()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end = self._clock.mark()
        super().__exit__(*error)
        self._bytes = {number: self._bytes_of(self._pipeline.layers[number]) for number in self._pipeline.present}

    def gather(self) -> PipelineProfile:
        """Return the profile of all stages on every rank, after the block; collective."""
        return self.profile_of(meet_over(self._pipeline.process_group, self._pipeline.device)(*self.figures()))

    def figures(self, scale: Scale | None = None) -> list[float]:
        """Return this stage's figures after the block, equally many on all stages; see :meth:`profile_of`.

        They are seconds of the block and of the loss, then each layer's seconds of forward and backward, which are
        scaled, and its bytes of weights, gradients, optimizer state and activations; zeros fill the rest. On a GPU it
        waits until the device has come to the end of the block.
        """
        loss = len(self._pipeline.layers)
        seconds_of = {number: [0.0, 0.0] for number in (*self._bytes, loss)}
        self._clock.wait_for(self._end)
        for number, is_forward, begin, end in self._measured:
            if number in seconds_of:
                seconds_of[number][0 if is_forward else 1] += self._clock.seconds(begin, end)
        most = max(stop - start for start, stop in itertools.pairwise(self._boundaries))
        stage_figures = [self._clock.seconds(self._begin, self._end), sum(seconds_of[loss])]
        for number, sizes in self._bytes.items():
            saved = self._saved[number].total if number in self._saved else 0
            forward_s, backward_s = seconds_of[number]
            seconds = (forward_s, backward_s) if scale is None else scale(number, forward_s, backward_s)
            stage_figures += [*seconds, *map(float, sizes), float(saved)]
        return stage_figures + [0.0] * (2 + most * NUM_FIGURES - len(stage_figures))

    def profile_of(self, figures: Sequence[Sequence[float]]) -> PipelineProfile:
        """Return the profile of which all stages [S] have given these :meth:`figures`."""
        layers = [
            layer
            for (start, stop), of_stage in zip(itertools.pairwise(self._boundaries), figures, strict=True)
            for layer in layers_of(of_stage[2 : 2 + (stop - start) * NUM_FIGURES])
        ]
        stage_s = tuple(own[0] for own in figures)
        return PipelineProfile(tuple(layers), stage_s, self._boundaries, math.fsum(own[1] for own in figures))

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        if self._counts_activations and is_forward and number in self._pipeline.present and number not in self._saved:
            self._saved[number] = SavedBytes(self._pipeline.layers[number], inputs)  # of one micro-batch
        self._begun.append(self._clock.mark())

    def ends(self, number: int, is_forward: bool) -> None:
        self._measured.append((number, is_forward, self._begun.pop(), self._clock.mark()))
        if is_forward and number in self._saved:
            self._saved[number].end()

    def _bytes_of(self, layer: nn.Module) -> tuple[int, int, int]:
        """Of weights, gradients and optimizer state."""
        parameters = list(layer.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        states = [] if self._optimizer is None else [self._optimizer.state.get(one, {}) for one in parameters]
        of_state = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        weights, grads, state = (
            sum(one.nbytes for one in tensors) for tensors in ([*parameters, *layer.buffers()], gradients, of_state)
        )
        return weights, grads, state


class WorkCounter:
    """Counts what the layers of this rank do, block by block, so that a profile of one tells of all since the last.

    Where routing changes a layer's work from step to step, one measured block tells of that step's luck. A count has no
    unit, must be proportional to the layer's seconds, and waits for no device. A profile's seconds are those of the
    measured block × the mean count of the blocks since the last profile / the count of this one. Layers that arrive are
    counted from their first whole block on.
    """

    def __init__(self, pipeline: Pipeline, count_work: CountWork | None) -> None:
        self._pipeline = pipeline
        self._rows = GivenRows(pipeline.layers) if count_work == "tokens" else None
        self._count = self._rows if count_work == "tokens" else count_work
        self._counts: dict[int, list[float]] = {}  # of each layer, block by block since it is here
        self._seconds_per_count: dict[int, tuple[float, float]] = {}
        self._num_blocks = 0  # since the last profile
        self._begun_with: range = range(0)
        self._error: Exception | None = None

    def begin_block(self) -> None:
        """Begin a block with the layers that are here now."""
        self._begun_with = self._pipeline.present
        if self._rows is not None:
            self._rows.reset()

    def end_block(self) -> None:
        """Count what the layers of this block have done; an error of counting is kept for :meth:`measured_block`."""
        if self._count is None:
            return
        self._num_blocks += 1
        for number in self._begun_with:
            count = 0.0
            try:
                count = float(self._count(self._pipeline.layers[number]))
                if not 0.0 <= count < math.inf:
                    raise ValueError(
                        f"count_work returned {count} for layer {number}: a number of at least 0 is needed"
                    )
            except Exception as error:  # whatever the user's function raises: other ranks must hear of it
                self._error, count = self._error or error, 0.0
            self._counts.setdefault(number, []).append(count)
        for here in (self._counts, self._seconds_per_count):
            for number in [each for each in here if each not in self._pipeline.present]:
                del here[number]

    def measured_block(self) -> CountedBlock:
        """Return the counts of the block that has just ended, which was measured."""
        num_meant = max(self._num_blocks, _LEAST_COUNTED)
        counts = {number: (values[-1], fmean(values[-num_meant:])) for number, values in self._counts.items()}
        for values in self._counts.values():
            del values[:-_LEAST_COUNTED]
        self._num_blocks = 0
        return CountedBlock(counts, self._error, self._seconds_per_count)

    def forget(self) -> None:
        """Forget all counts, as layers have other work from now on."""
        self._counts.clear()
        self._seconds_per_count = {}  # not cleared: a block that is still to be read has the old one


@dataclass(frozen=True)
class CountedBlock:
    """Scale the seconds of a measured block to its layers' mean work, by counts in the block and on average.

    Where something could not be counted, ``error`` says why.
    """

    counts: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    error: Exception | None = None
    _seconds_per_count: dict[int, tuple[float, float]] = field(default_factory=dict)

    def mean_seconds(self, number: int, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Return the seconds that a layer takes on average, by those that it has taken in this block.

        A layer that had nothing to do in it takes what it took for as much work in the last one in which it had some.
        """
        now, mean = self.counts.get(number, (0.0, 0.0))
        if now > 0.0:
            self._seconds_per_count[number] = forward_s / now, backward_s / now
        per_count = self._seconds_per_count.get(number, (0.0, 0.0))
        if mean == 0.0 or sum(per_count) == 0.0:
            return forward_s, backward_s
        return per_count[0] * mean, per_count[1] * mean


class GivenRows:
    """Counts the rows that each module with a matrix is given, times the elements of its matrices.

    A row is a vector of the last dimension of the first floating-point tensor, such as a token's hidden state: what is
    looked up by index, as in embeddings, does not count. Only shapes are read, so of experts that are one parameter of
    three dimensions the rows are counted that all of them are given, not those of the busiest one. Hooks stay on the
    layers' modules until this object is gone.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._rows: dict[nn.Module, list[float]] = {}
        handles = []
        for module in (module for layer in layers for module in layer.modules()):
            if module not in self._rows and _num_weights(module):
                rows = self._rows[module] = [0.0]
                handles.append(module.register_forward_pre_hook(partial(_add, rows), with_kwargs=True))
        finalize(self, remove_all, handles)

    def reset(self) -> None:
        """Begin to count anew."""
        for rows in self._rows.values():
            rows[0] = 0.0

    def __call__(self, layer: nn.Module) -> float:
        """Return what a layer was given since :meth:`reset`."""
        return math.fsum(self._rows[one][0] * _num_weights(one) for one in layer.modules() if one in self._rows)


def _add(rows: list[float], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """As a hook, to ``rows[0]``."""
    for value in args or kwargs.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            shape = value.shape
            rows[0] += value.numel() / shape[-1] if shape and shape[-1] else 0.0
            return


def _num_weights(module: nn.Module) -> int:
    """Elements of its own matrices."""
    return sum(one.numel() for one in module.parameters(recurse=False) if one.dim() > 1)


class BlockSeconds:
    """Takes the seconds of blocks, usual ones and measured ones: what measuring takes on this rank is the difference.

    Wall time cannot tell: in a pipeline it is mostly that of other stages, and it varies by more than a profile takes.
    The processor's time can: what hooks and decisions spend is in it, waits are not. On CPU that is the time of the
    thread that trains, which runs forward, backward and all hooks of them; on a GPU backward has a thread of its own,
    so there it is the time of the process, and also counts what the device would have hidden. A step's length is wall
    time on a GPU only, whose work is none of the processor's.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._usual: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._profiled_s = self._handling_s = 0.0
        self._begun_s, self._begun_at = 0.0, 0.0
        self._last_s: float | None = None  # of the block before, where it was a usual one

    def begin(self) -> None:
        """Begin a block."""
        now = time.perf_counter() if self._on_gpu else self._now()
        if self._last_s is not None:
            self._usual.append((self._last_s, now - self._begun_at))
        self._begun_at, self._last_s, self._begun_s = now, None, self._now()

    def end(self, *, is_measured: bool, is_usual: bool) -> None:
        """End what is computed in a block."""
        spent_s = self._now() - self._begun_s
        if is_measured:
            self._profiled_s = spent_s
        elif is_usual:
            self._last_s = spent_s

    @contextmanager
    def handling(self, *, by_wall: bool = False) -> Iterator[None]:
        """Count what the block spends as spent on a profile; all stages wait for what is spent ``by_wall``."""
        clock = time.perf_counter if by_wall else self._now
        begin = clock()
        try:
            yield
        finally:
            self._handling_s += clock() - begin

    def forget(self) -> None:
        """Forget what is usual and what was handled, as blocks have other work from now on."""
        self._usual.clear()
        self._last_s, self._handling_s = None, 0.0

    def spent(self) -> SpentSeconds:
        """Return what the block that was measured last has taken, and what was handled since this was last asked."""
        handling_s, self._handling_s = self._handling_s, 0.0
        usual_s = step_s = 0.0
        if len(self._usual) >= _LEAST_USUAL:
            usual_s, step_s = map(median, zip(*self._usual, strict=True))
        return SpentSeconds(usual_s, self._profiled_s, handling_s, step_s)

    def _now(self) -> float:
        return time.process_time() if self._on_gpu else time.thread_time()


@dataclass(eq=False)
class _MeasuredBlock:
    """What one stage knows of a block: its layers, their work, what measuring takes, and whether it is still of use."""

    profiler: LayerProfiler | None  # none while balancing is off, when stages only tell their wishes
    counted: CountedBlock
    spent: SpentSeconds
    is_of_use: bool = True

    def figures(self) -> list[float]:
        """What the other stages are sent, equally many numbers on all of them."""
        failed = float(self.counted.error is not None)
        figures = [] if self.profiler is None else self.profiler.figures(self.counted.mean_seconds)
        return [failed, *astuple(self.spent), *figures]


class Measuring:
    """Follows a pipeline from block to block; each is begun, ended, and then exchanged.

    The cadence learns what profiles cost. Of replicas beside this pipeline the dearest counts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        cadence: ProfileCadence,
        counter: WorkCounter,
        replicas: PipelineReplicas | None,
        *,
        counts_activations: bool,
    ) -> None:
        self._pipeline, self._optimizer, self._counts_activations = pipeline, optimizer, counts_activations
        self._cadence, self._counter, self._replicas = cadence, counter, replicas
        self._logged_every = cadence.every
        self.seconds, self.restraint = BlockSeconds(pipeline.device), Restraint()
        self._close: Callable[[], object] = lambda: None
        #: What was measured in this block; on a GPU in the block before; and what is under way.
        self._measured: _MeasuredBlock | None = None
        self._unread: _MeasuredBlock | None = None
        self._sent: _MeasuredBlock | None = None

    @property
    def tells(self) -> bool:
        """Return whether this rank writes the log of all."""
        return self._pipeline.stage == 0 and (self._replicas is None or self._replicas.is_first)

    def connect(self) -> None:
        """Make the group over which profiles travel, and leave the one before; collective."""
        self.disconnect()
        self._exchange = Exchange(CpuGroup(self._pipeline.process_group, {}))
        self._close = finalize(self, self._exchange.close)

    def disconnect(self) -> None:
        """Leave that group."""
        self._close()
        self._unread = self._sent = None

    def begin_block(self) -> None:
        """Begin a block."""
        self._counter.begin_block()
        self.seconds.begin()

    def new_profiler(self) -> LayerProfiler:
        """Return what measures this block."""
        return LayerProfiler(self._pipeline, self._optimizer, counts_activations=self._counts_activations)

    def end_block(self, profiler: LayerProfiler | None, *, is_due: bool, is_usual: bool) -> None:
        """End what is computed in a block, usual where nothing else has happened in it but training."""
        self.seconds.end(is_measured=profiler is not None, is_usual=is_usual)
        self._counter.end_block()
        self._measured = None
        if profiler is not None:
            self._measured = _MeasuredBlock(profiler, self._counter.measured_block(), self.seconds.spent())
        elif is_due:
            self._measured = _MeasuredBlock(None, CountedBlock(), SpentSeconds(*[0.0] * _NUM_SPENT))

    @property
    def is_under_way(self) -> bool:
        """Return whether figures of a block are on their way to the other stages; the same on every rank."""
        return self._sent is not None or self._unread is not None

    def exchange(self, num_blocks: int) -> PipelineProfile | None:
        """Send what was measured in this block, and return what was in an earlier one; collective at the end of each.

        What the profile has cost decides when the next one is due. It is told how many blocks are over.

        Raises:
            RuntimeError: if a rank does not come; on all, if they called :meth:`forget_work` unequally often.
            ValueError: on every rank, if the work of a layer could not be counted on one.
        """
        measured, self._measured = self._measured, None
        if measured is None and not self.is_under_way:
            return None
        with self.seconds.handling():
            self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, num_blocks
            rows, sent = self._exchange.collect(), self._sent
            self._sent = measured
            if self._pipeline.device.type == "cuda":
                self._sent, self._unread = self._unread, measured
            if self._sent is not None:
                self._exchange.post([self.restraint.wish(), *self._sent.figures()])
            if rows is None or sent is None or not sent.is_of_use:
                return None
            figures = [row[_NUM_SPENT + 2 :] for row in rows]
            profile = None if sent.profiler is None else sent.profiler.profile_of(figures)
        self._learn(rows, sent.counted.error, num_blocks)
        return None if self.restraint.state == "off" else profile

    def _learn(self, rows: Sequence[Sequence[float]], error: Exception | None, num_blocks: int) -> None:
        """Learn the wishes of the stages, and what the profile has cost them."""
        wish, failed = max(row[0] for row in rows), [stage for stage, row in enumerate(rows) if row[1]]
        cost, num_failed = profile_cost([SpentSeconds(*row[2 : _NUM_SPENT + 2]) for row in rows]), float(len(failed))
        if self._replicas is not None:
            largest, num_failed, wish = self._replicas.gather_most(-1.0 if cost is None else cost, num_failed, wish)
            cost = None if largest < 0.0 else largest
        self.restraint.agree([wish], num_blocks, tells=self.tells)
        if num_failed:
            where = f"stages {failed}" if failed else "a replica of this pipeline"
            raise ValueError(f"count_work failed on {where}{'' if error is None else f': {error}'}") from error
        self._cadence.learn(cost)
        every = self._cadence.every
        if not self._logged_every < 2 * every < 4 * self._logged_every:
            self._logged_every = every
            if self.tells:
                logger.info(
                    "step %d: layers are measured in one step of %d, as that takes %.1f %% of a step",
                    num_blocks,
                    every,
                    100.0 * self._cadence.cost,
                )

    def forget_work(self) -> None:
        """Drop profiles that are under way, and counts, as they are of work that is no more; on every rank alike."""
        self._exchange.where.num_work_changes += 1
        for block in (self._sent, self._unread):
            if block is not None:
                block.is_of_use = False
        self._counter.forget()
        if self._cadence.costs:  # else what profiles cost would never be known where work changes every few steps
            self.seconds.forget()


class StageLinks:
    """Measures the links of a pipeline over which activations and gradients travel, again and again, as they vary.

    Of replicas beside it the slowest link counts.
    """

    def __init__(self, pipeline: Pipeline, replicas: PipelineReplicas | None) -> None:
        self._pipeline, self._replicas = pipeline, replicas
        self._measured: deque[list[list[float]]] = deque(maxlen=_REMEMBERED_LINKS)

    def measure(self, num_steps: int) -> PipelineMessages:
        """Return what messages take by now, of all steps in a block, on every rank; collective."""
        pipeline, sizes = self._pipeline, self._pipeline.message_bytes
        usual = max(_LEAST_BYTES, *(round(sizes[layer]) for layer in pipeline.boundaries[1:-1]), 0)
        links = measure_neighbour_links(pipeline.process_group, pipeline.device, num_bytes=usual)
        seconds = [[link.seconds_per_byte, link.fixed_s] for link in links]
        if self._replicas is not None:
            flat = self._replicas.gather_most(*itertools.chain.from_iterable(seconds))
            seconds = [list(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
        if self._measured and len(self._measured[0]) != len(seconds):
            self._measured.clear()
        self._measured.append(seconds)
        typical = num_steps * np.median(self._measured, axis=0)
        return PipelineMessages(tuple(MoveCost(*pair) for pair in typical.tolist()), sizes)
