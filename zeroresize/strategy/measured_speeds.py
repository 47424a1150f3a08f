"""How fast the ranks of a switchable model are: each step's busy seconds, exchanged while the next step runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import finalize

import torch

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Call
from zeroresize.measure.clocks import Clock, clock_for
from zeroresize.measure.device_speed import product_seconds
from zeroresize.measure.step_timer import StepTimer
from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds
from zeroresize.strategy.model import SwitchableModel

#: A rank without a part looks how fast it is once in so many steps, and one with a part once in so many, so that it is
#: known what that says of training.
PROBE_EVERY, _PROBE_WITH_PART_EVERY = 4, 16
#: By products of weights of this size that take so many seconds, of which the fastest of so many counts.
_PROBE_SIZE, _PROBE_S, _PROBE_REPETITIONS = 256, 0.002, 3


class MeasuredSpeeds:
    """Learns the ranks' speeds from what their parts of steps took, waits left out, and should have taken.

    A rank without a part looks how fast it is by a few products. Its constructor and :meth:`end` are collective.

    Args:
        model: whose ranks they are.
        agreement: what all ranks must have alike, by names.
        probe: ``probe()`` gives seconds of a few products on this rank; None for products on its device.
        clock: for the busy seconds; None for that of the model's device.

    Attributes:
        num_steps: how many are over.
        exchange: between the ranks; others may meet over it between steps.
        worked: of the last step known of all ranks, the most seconds that one has worked out what to do, since the step
            before, and the most that the step took on one; the same on all ranks.

    Raises:
        ValueError: on all ranks, if they differ in the agreement.
        RuntimeError: if a rank does not come.
    """

    def __init__(
        self,
        model: SwitchableModel,
        agreement: Mapping[str, str],
        *,
        probe: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.num_steps, self.worked = 0, (0.0, 0.0)
        self._working_s = 0.0
        self.exchange = Exchange(CpuGroup(model.process_group, agreement))
        self._speeds = RankSpeeds(len(self.exchange.ranks))
        self._work_s: deque[float] = deque()  # of steps whose seconds are not read yet
        self._steps_without, self._probe_s = 0, 0.0  # steps without a part in a row
        self._timer = StepTimer(clock or clock_for(model.device))
        self._probe = probe or _Products(model.device)
        self.close: Callable[[], object] = finalize(self, _close, self.exchange, self._timer)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Return [R] how many times as fast each rank is as expected; None before enough is known of all."""
        return self._speeds.speeds()

    def begin(self, *, has_part: bool) -> None:
        """Begin to measure what this rank does in a step, in which it has a part or none."""
        every, steps = (_PROBE_WITH_PART_EVERY, self.num_steps) if has_part else (PROBE_EVERY, self._steps_without)
        self._probe_s = self._probe() if steps % every == PROBE_EVERY - 1 else 0.0
        self._steps_without = 0 if has_part else self._steps_without + 1
        self._timer.begin_step()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the seconds within as spent on working out what to do about slow ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._working_s += time.perf_counter() - begin

    def end(self, work_s: float, step_s: float) -> bool:
        """End the step, and return whether the speeds have been learned anew, alike on all ranks; collective.

        Args:
            work_s: what this rank should have taken; 0 without a part.
            step_s: what the step took, all in all.

        Raises:
            RuntimeError: if a rank does not come.
        """
        times = self._timer.end_step()
        self._work_s.append(work_s)
        self.num_steps += 1
        self.exchange.where.call, self.exchange.where.num_steps = Call.STEP, self.num_steps
        table = self.exchange.collect()
        # On a device the seconds of a step are read one or more steps later.
        busy = [(each.busy_s, self._work_s.popleft()) for each in times]
        busy_s, expected_s = busy[-1] if busy else (0.0, 0.0)
        self.exchange.post([busy_s, expected_s, self._probe_s, self._working_s, step_s])
        self._working_s = 0.0
        if table is None:
            return False
        busy_R, expected_R, probe_R, working_R, step_R = zip(*table, strict=True)
        self._speeds.learn(busy_R, expected_R, probe_R)
        self.worked = max(working_R), max(step_R)
        return True

    @property
    def learned(self) -> RankSpeeds:
        """Return what was learned, the same on every rank."""
        return self._speeds

    def go_on_from(self, learned: RankSpeeds, num_steps: int) -> None:
        """Go on from :attr:`learned` after so many steps, between two steps, on every rank alike.

        Of another number of ranks nothing is taken over.
        """
        num_ranks = len(self.exchange.ranks)
        self._speeds = learned if learned.num_ranks == num_ranks else RankSpeeds(num_ranks)
        self.num_steps = num_steps
        self.exchange.collect()  # of steps before


class _Products:
    """Seconds of the three products of a layer of a fixed size on a device."""

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device)

    def __call__(self) -> float:
        return product_seconds(self._weight, least_s=_PROBE_S, repetitions=_PROBE_REPETITIONS)


def _close(exchange: Exchange, timer: StepTimer) -> None:
    timer.close()
    exchange.close()
