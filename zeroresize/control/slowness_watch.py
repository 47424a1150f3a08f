"""Exchanges what the ranks' steps take, and says in the log who is slow: for ``zr.watch``, and a balancer that is off.

Numbers go out after every so many steps, while training goes on, and are asked for at the end of every step: nobody
waits. So the same rounds come to every rank in the same order, perhaps a step or two apart.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from zeroresize.comm.exchange import Exchange, GatheredNumbers
from zeroresize.measure.gpu_state import GpuReader
from zeroresize.measure.waits import Where, place_of
from zeroresize.policy.slowness.group_slowness import TOLERANCE, GroupSlowness, WatchReport
from zeroresize.policy.slowness.lines import lines_of, past_line
from zeroresize.policy.slowness.surroundings import NUM_NUMBERS, Place, Surroundings
from zeroresize.policy.slowness.windows import Sampling, StepWindow, WatchedStep, usual_waits, window_of
from zeroresize.resharding.agreement import text_numbers, text_of
from zeroresize.status import RankStatus, Status

logger = logging.getLogger(__name__)


class SlownessWatch:
    """Watches this rank's steps together with the others'; rank 0 of the group writes the log."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        num_ranks: int,
        update_every: int,
        device: torch.device,
        tolerance: float = TOLERANCE,
        on_status: Callable[[Status], object] | None = None,
    ) -> None:
        self._on_status = on_status if rank == 0 else None
        self._exchange, self._rank = exchange, rank
        nodes = [text_of(numbers) for numbers in exchange.gather(text_numbers(socket.gethostname()))]
        self._group, self._gpu = GroupSlowness(num_ranks, tolerance, nodes), GpuReader(device)
        self._places: dict[Where, Place] = {}
        self._steps: list[WatchedStep] = []
        self._pending: deque[GatheredNumbers] = deque()
        self._sampling = Sampling(update_every)
        self._num_steps, self._num_listened, self._is_over = 0, 0, False
        self._watching_s, self._listening_s = 0.0, 0.0

    @property
    def listens(self) -> bool:
        """Whether the step that begins is to be listened to."""
        return not self._is_over and self._sampling.listens_to(self._num_steps + 1)

    def count_cost(self, seconds: float) -> None:
        """Count what listening to a step has cost."""
        self._num_listened += 1
        self._listening_s += seconds

    def end_step(self, read: Iterable[WatchedStep]) -> None:
        """Count a step that is over; ``read`` are the steps whose times could be read since the last call."""
        if self._is_over:
            return
        began = time.perf_counter()
        self._num_steps += 1
        self._steps += read
        try:
            while self._pending and self._pending[0].has_ended:
                self._take(self._pending.popleft().take())
            while self._sampling.ends_window(self._num_steps):
                cost_s = self._listening_s / self._num_listened if self._num_listened else math.nan
                window = window_of(self._steps, self._num_steps)
                numbers = [cost_s, *window.as_numbers(), *self._surroundings().as_numbers()]
                self._steps, self._num_listened, self._listening_s = [], 0, 0.0
                # Never left out: the ranks' rounds meet in the order in which they are started.
                self._pending.append(GatheredNumbers(self._exchange.group, numbers))
        except RuntimeError as error:
            self._is_over = True
            self._pending.clear()
            logger.warning(
                "step %d: slow ranks are not watched any more, as exchanging times with the other ranks failed: %s",
                self._num_steps,
                str(error).partition("\n")[0] or type(error).__name__,
            )
        self._watching_s = time.perf_counter() - began

    def report(self) -> WatchReport:
        """Return who is slow, as of the last round that has come."""
        return self._group.report()

    def metrics(self) -> dict[str, float]:
        """Return what :meth:`zeroresize.watching.Watch.metrics` tells."""
        report = self.report()
        numbers = {
            "cost_s": report.cost_s,
            "num_slow": float(len(report.slow)),
            "share_saved": report.share_saved,
            "slower": next((slow.times for slow in report.slow if slow.rank == self._rank), 1.0),
            "step_s": report.step_s,
            "watching_s": self._watching_s,
        }
        if report.scores:
            numbers |= {"busy_s": report.busy_s[self._rank], "score": report.scores[self._rank]}
        if report.past_scores:
            numbers["past_score"] = report.past_scores[self._rank]
        return {f"watch/{name}": value for name, value in numbers.items()}

    def close(self) -> None:
        """Drop what is under way, and exchange nothing more; to be called before the exchange is closed.

        Where another rank has made fewer steps, what is under way is ended, as leaving the ranks would wait for it, but
        after a second: gloo may wait until the time limit of the group for what is ended just when it arrives.
        """
        if not all(numbers.has_ended_within(1.0) for numbers in self._pending):
            self._exchange.group.abort()
        self._is_over = True
        self._pending.clear()

    def _take(self, rows: Sequence[Sequence[float]]) -> None:
        windows = [StepWindow.of_numbers(numbers[1:-NUM_NUMBERS]) for numbers in rows]
        self._sampling.take(max(cost_s for cost_s, *_ in rows), min(window.step_s for window in windows))
        events = self._group.update(windows, [Surroundings.of_numbers(numbers[-NUM_NUMBERS:]) for numbers in rows])
        if self._rank == 0 and (events or self._on_status is not None):
            report = self.report()
            if self._on_status is not None:
                self._on_status(status_of_watch(report, "on"))
            for line in lines_of(events, report, compares_work=self._group.compares_work):
                logger.warning("step %d: %s", self._num_steps, line)

    def _surroundings(self) -> Surroundings:
        """Return where this rank waited most since the last window, and how its GPU is."""
        waits_s = dict[Place, float]()
        for where, seconds in usual_waits(self._steps).items():
            if where not in self._places:
                self._places[where] = place_of(where)
            place = self._places[where]
            waits_s[place] = waits_s.get(place, 0.0) + seconds
        return Surroundings(waits_s, self._gpu.read())


def status_of_watch(report: WatchReport, state: str) -> Status:
    """Return the status of a group whose work nobody divides."""
    return Status(
        kind="nothing",
        state=state,
        step=report.step,
        time=time.time(),
        step_s=report.step_s,
        expected_step_s=math.nan,
        even_step_s=math.nan,
        saved_s=math.nan,
        cost_s=report.cost_s,
        ranks=statuses_of(report, [1.0] * report.num_ranks),
        decided="".join(past_line(each, report) for each in report.past[:1]),
    )


def statuses_of(report: WatchReport, shares: Sequence[float]) -> tuple[RankStatus, ...]:
    """Return [R] what is seen of ranks that compute these shares [R]; none before they were measured."""
    slow = {each.rank: (each.since_step, each.cause, each.cost_s) for each in report.slow}
    scores = report.past_scores or (math.nan,) * report.num_ranks
    nodes, waits_s = report.nodes or ("",) * report.num_ranks, report.waits_s or ({},) * report.num_ranks
    known = zip(report.busy_s, report.scores, shares, scores, nodes, waits_s, strict=False)
    return tuple(
        RankStatus(rank, busy_s, score, share, *slow.get(rank, (None, "", 0.0)), *further)
        for rank, (busy_s, score, share, *further) in enumerate(known)
    )
