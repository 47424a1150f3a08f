"""Busy time and product time of an iteration, on the CPU's clock or by device events.

On a GPU the times come from events that are read one iteration late, when the device has passed them, so nothing is
synchronised.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from zeroresize.kernels.probe import ProductProbe
from zeroresize.measure import waits
from zeroresize.measure.clocks import Clock
from zeroresize.measure.waits import Where
from zeroresize.plan.group import Workshares
from zeroresize.policy.tensor.estimation.times import WHOLE, StepTimes
from zeroresize.utils.torch_private import current_backward

#: At most so many pairs of marks are kept, besides those that the device has not passed yet.
_MOST_PAIRS = 1024


@dataclass
class _Step:
    """One iteration while it is measured.

    ``pairs`` are the intervals of which the clock has not told the seconds yet, each with its kind, its layer, and
    where it waits; ``seconds`` are the sums of the others by kind, ``layers`` those of products by layer, and ``waits``
    those of waits by where. ``outside_begin`` is since when no balanced layer computes: from the beginning, or the end
    of a backward, to the next forward. Waits meanwhile have a kind of their own, by the number of backwards before; a
    forward followed the first ``num_outside`` of these.
    """

    begin: Any
    shares: Workshares
    is_forced: bool
    outside_begin: Any
    end: Any = None
    num_backwards: int = 0
    num_outside: int = 0
    num_marks: int = 1
    pairs: deque[tuple[str, str | None, Where, Any, Any]] = field(default_factory=deque)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    layers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: defaultdict[Where, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def marks(self) -> list[Any]:
        """Those that are kept."""
        pairs = [(self.outside_begin, self.end), *((begin, end) for *_, begin, end in self.pairs)]
        marks_of_pairs = [mark for pair in pairs for mark in pair if mark is not None and mark is not self.begin]
        return [self.begin, *marks_of_pairs]

    @property
    def kind_of_waits(self) -> str:
        return "waits" if self.outside_begin is None else f"waits {self.num_backwards}"

    def add(self, kind: str, layer: str | None, begin: Any, end: Any, clock: Clock, where: Where = None) -> None:
        self.num_marks += 2
        if clock.is_immediate:
            self._count(kind, layer, where, clock.seconds(begin, end))
            return
        self.pairs.append((kind, layer, where, begin, end))
        if len(self.pairs) >= _MOST_PAIRS:
            self.sum_up(clock)

    def sum_up(self, clock: Clock) -> bool:
        """Turn what the clock has passed into seconds; return whether that is all."""
        pairs = self.pairs
        while pairs and clock.has_passed(pairs[0][-1]):
            kind, layer, where, begin, end = pairs.popleft()
            self._count(kind, layer, where, clock.seconds(begin, end))
            clock.recycle(end) if begin is self.begin else clock.recycle(begin, end)
        return not pairs

    def _count(self, kind: str, layer: str | None, where: Where, elapsed_s: float) -> None:
        self.seconds[kind] += elapsed_s
        is_wait = kind.startswith("waits")
        if is_wait:
            self.waits[where] += elapsed_s
        if layer is not None:
            self.layers[layer] += -elapsed_s if is_wait else elapsed_s


class StepTimer(ProductProbe):
    """Sums the products of the layers it probes and the waits of training, iteration by iteration.

    Training is the thread that begins the steps, and autograd's threads. What other threads wait for (a checkpoint that
    is saved in the background, batches that are fetched ahead) holds up nobody here. Nor do products of an
    evaluation count: no plan relieves them.

    Attributes:
        waits: of the steps that :meth:`end_step` has returned last, the seconds of waits by where they were.
    """

    sees_evaluation = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waits: list[dict[Where, float]] = []
        self._unread: deque[_Step] = deque()
        self._step: _Step | None = None
        self._thread = threading.get_ident()
        self._begun = threading.local()
        self._last_num_marks = 0
        self._mark_s = self._measure_mark_s()
        waits.listen(self)

    def begin_step(self, shares: Workshares = WHOLE, is_forced: bool = False) -> None:
        """Begin an iteration in which this rank computes what ``shares`` leaves it.

        Whatever was measured since the last ``end_step`` is dropped.
        """
        self._drop_step()
        self._thread = threading.get_ident()
        self._clock.enter_main_stream()
        begin = self._clock.mark()
        self._step = _Step(begin, shares, is_forced, outside_begin=begin)

    def end_step(self) -> list[StepTimes]:
        """End the iteration; return the times of the iterations that can be read now without waiting.

        On the CPU's clock that is this iteration; on a device the one before, none, or several.
        """
        step, self._step = self._step, None
        if step is not None:
            if step.outside_begin not in (None, step.begin):  # the optimizer's step: it is less where units are few
                step.add("update", None, step.outside_begin, self._clock.mark(), self._clock)
                step.num_marks -= 1  # of the two one was counted when it was taken
            step.outside_begin, step.end = None, self._clock.mark()
            self._last_num_marks = step.num_marks + 1
            self._unread.append(step)
        read: list[_Step] = []
        while self._unread and self._clock.has_passed(self._unread[0].end) and self._unread[0].sum_up(self._clock):
            read.append(self._unread.popleft())
        self.waits = [each.waits for each in read]
        return [self._read(each) for each in read]

    @property
    def timer_s(self) -> float:
        """What measuring cost in the last finished iteration: its marks times the cost of one, in seconds."""
        return self._last_num_marks * self._mark_s

    def close(self) -> None:
        """Stop listening to waits, and record nothing more."""
        waits.stop_listening(self)
        self._drop_step()

    def work_begins(self) -> None:
        """Note that the model computes: what lay outside ends here. In a backward its end is watched from now on."""
        waits.watch_end_of_backward()
        step = self._step
        if step is not None and step.outside_begin is not None and self._counts():
            step.add("outside", None, step.outside_begin, self._clock.mark(), self._clock)
            step.num_marks -= 1  # of the two one was counted when it was taken
            step.outside_begin, step.num_outside = None, step.num_backwards + 1

    @property
    def is_outside(self) -> bool:
        """Whether the model has not begun to compute since the step began, or since its last backward ended."""
        step = self._step
        return step is None or step.outside_begin is not None

    def product_begins(self, layer: str | None = None) -> None:
        """Begin a product, that of the layer that ``layer`` names."""
        self.work_begins()
        self._begun.layer = layer
        self._begin("products")

    def product_ends(self, layer: str | None = None) -> None:
        """End a product, that of the layer that ``layer`` names."""
        self._end("products", "products", layer)

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        self._begin("gemms")

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self._end("gemms", "gemms")

    def wait_begins(self, where: Where = None) -> None:
        self._begun.where = where
        self._begin("waits")

    def wait_ends(self) -> None:
        step = self._step
        if step is not None:
            around = [what for what in ("gemms", "products") if getattr(self._begun, what, None) is not None]
            kind = f"waits in {around[0]}" if around else step.kind_of_waits
            self._end("waits", kind, self._begun.layer if around else None, self._begun.where)

    def backward_ends(self) -> None:
        # Where none of these layers has computed since, it is the backward of another model.
        step = self._step
        if step is not None and step.outside_begin is None and self._counts():
            step.outside_begin = self._clock.mark()
            step.num_marks += 1
            step.num_backwards += 1

    def _counts(self) -> bool:
        """Whether what is done now is a part of the step."""
        is_training_thread = threading.get_ident() == self._thread or current_backward() != -1
        return is_training_thread and self._clock.is_on_main_stream()

    def _begin(self, what: str) -> None:
        if self._step is not None and self._counts():
            setattr(self._begun, what, self._clock.mark())

    def _end(self, what: str, kind: str, layer: str | None = None, where: Where = None) -> None:
        begin = getattr(self._begun, what, None)
        setattr(self._begun, what, None)
        step = self._step
        if step is not None and begin is not None:
            step.add(kind, layer, begin, self._clock.mark(), self._clock, where)

    def _drop_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._clock.recycle(*step.marks)

    def _measure_mark_s(self) -> float:
        """Seconds that one mark costs the CPU, bookkeeping included."""
        self.begin_step()
        probe = LayerTimer(self, "")
        num_pairs = _MOST_PAIRS // 2
        began = time.perf_counter()
        for _ in range(num_pairs):
            probe.product_begins()
            probe.product_ends()
        elapsed_s = time.perf_counter() - began
        self._step = None
        return elapsed_s / (2 * num_pairs)

    def _read(self, step: _Step) -> StepTimes:
        seconds, wall_s = step.seconds, self._clock.seconds(step.begin, step.end)
        self._clock.recycle(step.begin, step.end)
        waits_s = sum(elapsed_s for kind, elapsed_s in seconds.items() if kind.startswith("waits"))
        outside_wait_s = sum(seconds[f"waits {number}"] for number in range(step.num_outside))
        update_wait_s = seconds[f"waits {step.num_backwards}"] if step.num_backwards >= step.num_outside else 0.0
        gemms_s = max(seconds["gemms"] - seconds["waits in gemms"], 0.0)  # as of whole layers of hosts
        products_s = seconds["products"] - seconds["waits in products"] - seconds["waits in gemms"]
        products_s = max(products_s, gemms_s)
        busy_s = max(wall_s - waits_s, products_s)
        return StepTimes(
            busy_s=busy_s,
            gemm_s=gemms_s,
            gather_fill_s=products_s - gemms_s,
            shares=step.shares,
            is_forced=step.is_forced,
            wait_s=max(wall_s - busy_s, 0.0),
            outside_s=min(max(seconds["outside"] - outside_wait_s, 0.0), busy_s - products_s),
            outside_wait_s=outside_wait_s,
            update_s=min(max(seconds["update"] - update_wait_s, 0.0), busy_s - products_s),
            layers=dict(step.layers),
        )


class LayerTimer(ProductProbe):
    """Probes the layer of this name, whose products ``timer`` sums."""

    sees_evaluation = False

    def __init__(self, timer: StepTimer, layer: str) -> None:
        self.timer, self._layer = timer, layer

    def product_begins(self) -> None:
        self.timer.product_begins(self._layer)

    def product_ends(self) -> None:
        self.timer.product_ends(self._layer)

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        self.timer.gemm_begins(operands)

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self.timer.gemm_ends(operands)
