"""watch(): who is slow in a training, since when, by how much, why, and what it costs. It changes nothing."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, require_group
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup, let_others_fail
from zeroresize.control.slowness_watch import SlownessWatch, status_of_watch
from zeroresize.measure import waits
from zeroresize.measure.model_steps import ModelSteps
from zeroresize.optim.optimizers import hook_steps, torch_optimizer
from zeroresize.policy.slowness.group_slowness import TOLERANCE, GroupSlowness, WatchReport
from zeroresize.status import Status
from zeroresize.utils import value_checks
from zeroresize.utils.checked import checked, integer, real

logger = logging.getLogger(__name__)

#: Nobody means to overlook a rank that takes so many times as long again.
_MOST_TOLERANCE = 10.0


def _heard(name: str, optimizer: Any) -> None:
    """Check that the steps of an optimizer can be heard."""
    try:
        torch_optimizer(optimizer)
    except ValueError:
        raise ValueError(
            f"{name}={type(optimizer).__name__} is no torch.optim.Optimizer and has none as its .optim or .optimizer, "
            "so its steps cannot be heard: leave it out, and call step() of the watch after each"
        ) from None


@checked(
    tell=lambda given, error: let_others_fail(require_group(given["process_group"] or dist.group.WORLD), error),
    optimizer=_heard,
    update_every=integer(1),
    tolerance=real(above=0.0, below=_MOST_TOLERANCE),
)
def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    update_every: int = 10,
    tolerance: float = TOLERANCE,
    on_status: Callable[[Status], object] | None = None,
) -> Watch:
    """Watch who is slow while a model trains, whatever shards it: DDP, FSDP2, DTensor, compiled or plain modules.

    No layer changes, and no result. Rank 0 of the group logs a line, at level WARNING, when a rank becomes slow, when
    that changes, and when it is over. Collective over the group.

    Args:
        model: the module that the training loop calls, wrappers included, on its device.
        optimizer: the optimizer whose steps are the steps of training; None where :meth:`Watch.step` is called after
            each.
        process_group: the ranks that are compared, which should do equal work, or count it (:meth:`Watch.count`), or a
            one-dimensional ``DeviceMesh`` of them; None for all ranks of the job.
        update_every: steps between two exchanges of numbers, of those that are listened to: all at first, then one of
            so many, 32 at most, that a watch takes about half a percent of the time. Slowness is told once it has
            lasted for two exchanges.
        tolerance: by which share of the others' time a rank's own work must take longer, at least.
        on_status: called on rank 0 of the group with each new :meth:`Watch.status`, such as a
            :class:`~zeroresize.telemetry.JsonLinesTelemetry`, which ``zeroresize live`` reads.

    Raises:
        ValueError: for arguments of another kind, a group without this rank, or ranks that do not agree on them.
        RuntimeError: if not all ranks come within the time limit of their process group.
    """
    is_job = dist.is_available() and dist.is_initialized()
    group = require_group(process_group or dist.group.WORLD) if is_job else None
    return Watch(model, optimizer, group, update_every, tolerance, on_status)


class Watch:
    """Watches the ranks of a group; made by :func:`watch`, which tells the arguments.

    It ends with :meth:`close`, as a context manager, or when nobody holds it any more. In a group of one rank it does
    nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        group: ProcessGroup | None,
        update_every: int,
        tolerance: float,
        on_status: Callable[[Status], object] | None,
    ) -> None:
        self._has_optimizer, self._is_closed = optimizer is not None, False
        self._work = math.nan  # counted in this step so far
        self._spent_s = waits.spent_s
        self._steps: ModelSteps | None = None
        self._slowness: SlownessWatch | None = None
        self._attached = ExitStack()
        if group is None or group_size(group) == 1:
            logger.info("there is only one rank, so none can be slower than others: nothing is watched")
            return
        rank, num_ranks = group_rank(group), group_size(group)
        agreement = {
            "update_every of zeroresize.watch": str(update_every),
            "tolerance of zeroresize.watch": str(tolerance),
            "whether zeroresize.watch was given an optimizer": str(self._has_optimizer),
        }
        exchange = Exchange(CpuGroup(group, agreement, explains=False))
        self._attached.callback(exchange.close)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._slowness = SlownessWatch(exchange, rank, num_ranks, update_every, device, tolerance, on_status)
        self._attached.callback(self._slowness.close)
        self._steps = ModelSteps(model)
        self._attached.callback(self._steps.close)
        if self._has_optimizer:
            self._attached.callback(hook_steps(optimizer, after=self._end_step))
        weakref.finalize(self, self._attached.close).atexit = False

    def count(self, work: float | Tensor) -> None:
        """Count work of this rank's present step, at any time within it and as often as it has parts.

        Times for as much work are compared then, so that a rank with longer rows is not slow.

        Args:
            work: samples, tokens, or what else takes equally long, counted alike on all ranks. A step with 0 in all
                does not count. A tensor of one number is read, which waits for its device, in steps listened to.

        Raises:
            ValueError: for work that is no number from 0 on.
            RuntimeError: after :meth:`close`.
        """
        if self._is_closed:
            raise RuntimeError("this watch is closed: make a new one with zeroresize.watch(...)")
        if isinstance(work, Tensor) and self._steps is not None and not self._steps.listens:
            return
        work = work.item() if isinstance(work, Tensor) and work.numel() == 1 else value_checks.plain(work)
        value_checks.number("work", work, least=0.0)
        self._work = float(work) + (0.0 if math.isnan(self._work) else self._work)

    def step(self, work: float | Tensor | None = None) -> None:
        """Tell that a step of training is over, on every rank; only where no optimizer was given.

        Args:
            work: counts so much, as :meth:`count` does; None for no more than was counted.

        Raises:
            ValueError, RuntimeError: as of :meth:`count`, and where an optimizer was given, whose steps are counted.
        """
        if self._has_optimizer and not self._is_closed:
            raise RuntimeError(
                "step() is for watches without an optimizer: this one hears the steps of its optimizer. Call count() "
                "to count work"
            )
        if work is not None or self._is_closed:
            self.count(0.0 if work is None else work)
        self._end_step()

    def report(self) -> WatchReport:
        """Return who is slow now, since when, by how much and why, and what that has cost; the same on every rank.

        It is that of the last exchange, which may be a step or two older on some ranks.
        """
        return self._slowness.report() if self._slowness is not None else GroupSlowness(1).report()

    def status(self) -> Status:
        """Return :meth:`report` as every balancer tells its own: printed it is a table, also in a notebook."""
        return status_of_watch(self.report(), "ended" if self._is_closed else "on")

    @property
    def scores(self) -> tuple[float, ...]:
        """[R] of every rank, between 0 and 1: the usual busy time of the fastest rank as a share of its own.

        1 stands for as fast as the fastest, 0.5 for twice its time. Empty before the second exchange.
        """
        return self.report().scores if self._slowness is not None else (1.0,)

    def metrics(self) -> dict[str, float]:
        """Return this rank's numbers for any logger, names beginning with ``watch/``. Times are in seconds.

        Of this rank: ``busy_s`` (a usual step without waits for others), ``score`` (as in :attr:`scores`), ``slower``
        (how many times slower than the others as far as it was told; 1 where it is not slow), and ``watching_s`` (what
        deciding and exchanging took in the last step). Of the group: ``step_s``, ``num_slow``, ``cost_s`` (what slow
        ranks have cost so far) and ``share_saved`` (share of a step that a division of work by speed would save at
        most). NaN, or missing, before the second exchange; empty in a group of one.
        """
        return self._slowness.metrics() if self._slowness is not None else {}

    def close(self) -> None:
        """Take back all hooks, and leave the other ranks; what was seen can still be asked for."""
        self._is_closed = True
        self._attached.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_step(self) -> None:
        work, self._work = self._work, math.nan
        steps, slowness = self._steps, self._slowness
        if steps is None or slowness is None:
            return
        began, listened = time.perf_counter(), steps.listens
        slowness.end_step(steps.end_step(work, goes_on=False) if listened else [])
        if slowness.listens:
            steps.begin_step()
        elif listened:
            steps.pause()
        waits.spend(began)
        if listened:
            slowness.count_cost(waits.spent_s - self._spent_s)
        self._spent_s = waits.spent_s
