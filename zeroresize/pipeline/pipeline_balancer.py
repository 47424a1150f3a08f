"""Keeps the stages of a pipeline equally long while it is trained: profiles, decides, moves layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B

from zeroresize.comm.collectives import all_reduce
from zeroresize.pipeline.moving import LayerMoveReport, move_layers
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.profiling import LayerProfiler, PipelineProfile
from zeroresize.pipeline.rebalancing import Rebalancing
from zeroresize.pipeline.rebalancing_forecast import (
    MIN_SAVING,
    By,
    Method,
    RebalancingForecast,
    RebalancingRule,
    described,
)
from zeroresize.pipeline.releasing import Releasing, Repack
from zeroresize.resharding.agreement import NotEnoughMemoryError, fingerprint, meet_prepared, require_same
from zeroresize.utils.state_checks import count

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RebalancingRecord:
    """Layers have moved. Seconds of stages and steps are those of one block of ``PipelineBalancer.step``.

    Attributes:
        step: how many blocks were over, this one included.
        before, after: [S + 1] boundaries; of fewer stages after a re-packing.
        stage_s: [S] seconds that stages computed before.
        step_s, expected_step_s: before and after, as simulated from the layers' seconds.
        moved_bytes: of all ranks together.
        seconds: wall time of the move, of the slowest rank.
    """

    step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    stage_s: tuple[float, ...]
    step_s: float
    expected_step_s: float
    moved_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class PipelineBalancer:
    """Moves layers to other stages where that makes steps shorter by more than it takes::

        balancer = PipelineBalancer(pipeline, optimizer)
        for inputs, target in batches:
            optimizer.zero_grad()
            with balancer.step():
                pipeline.step(inputs, target=target)
            optimizer.step()

    In a block that is due every layer is measured: the second one, every ``profile_every``-th from there on, the one
    after next behind a move, and once more where a profile wants a move. At its end all ranks exchange the figures,
    decide alike, and move layers with gradients and optimizer state (:func:`~zeroresize.pipeline.move_layers`). In all
    other blocks nothing happens.

    A stage that becomes slow gets fewer layers, and gets them back when it recovers; see
    :mod:`zeroresize.pipeline.layer_costs` for how slow devices and heavy layers are told apart.

    Its constructor is collective, and so are the blocks.

    Args:
        optimizer: the only one that steps the pipeline's parameters; None for none.
        profile_every: blocks between two profiles.
        by: what is divided evenly: measured seconds, or bytes of parameters. Either way layers move only where steps
            become shorter.
        balancer: "partition" for the best division of all layers, "diffusion" for exchanges between neighbours.
        memory_limits: [S] bytes that layers of each stage may hold: weights, gradients, optimizer state and
            activations, these as if the stage kept as many micro-batches as the first one.
        min_saving: share of a step that a change must save at least.
        max_bytes: of messages at once in a move, as in :func:`~zeroresize.pipeline.move_layers`.
        on_change: is given a :class:`RebalancingRecord` after each move, on every rank.
        repack: whether, and when, the pipeline goes on with fewer stages (:func:`~zeroresize.pipeline.repack`); None
            for never. A rank that is released must leave the loop behind the block: ``if pipeline.is_released: break``.

    Attributes:
        steps: how many blocks are over.

    Raises:
        ValueError: for values that are not allowed, and for layers of which some share a parameter.
        RuntimeError: on every rank, if ranks differ in these values.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        profile_every: int = 100,
        by: By = "time",
        balancer: Method = "partition",
        memory_limits: Sequence[float] | None = None,
        min_saving: float = MIN_SAVING,
        max_bytes: int = 64 * 2**20,
        on_change: Callable[[RebalancingRecord], object] | None = None,
        repack: Repack | None = None,
    ) -> None:
        self.steps = 0
        self._pipeline, self._optimizer = pipeline, optimizer
        self._max_bytes, self._on_change = max_bytes, on_change
        self._next_profile = 0
        self._releasing = None if repack is None else Releasing(repack)
        alike: tuple[float, float] | Exception
        try:
            limits = None if memory_limits is None else tuple(map(float, memory_limits))
            if limits is not None and len(limits) != pipeline.num_stages:
                raise ValueError(f"memory_limits are {len(limits)}, not one of each of {pipeline.num_stages} stages")
            if repack is not None and limits is None and repack.max_slowdown == math.inf:
                raise ValueError("repack needs memory_limits, or a max_slowdown: nothing else would keep any stage")
            _require_no_ties(pipeline)
            rule = RebalancingRule(
                by,
                balancer,
                "1f1b" if issubclass(pipeline.schedule, Schedule1F1B) else "gpipe",
                pipeline.num_microbatches,
                profile_every,
                min_saving,
                limits,
            )
            self._rebalancing = Rebalancing(rule)
            alike = (fingerprint(f"{rule} {max_bytes} {repack}"), 0.0)
        except Exception as error:  # the others must hear of any
            alike = error
        meet = pipeline.meet()
        table = meet_prepared(meet, alike)
        require_same([one for one, *_ in table], "the options of PipelineBalancer", meet)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block with the ``pipeline.step`` calls of one step of the optimizer; collective.

        Layers may move at its end, and only there.

        Raises:
            ValueError: at the end, on every rank, if no boundaries fit into the memory limits.
            RuntimeError, ValueError: at the end, as :func:`~zeroresize.pipeline.move_layers`.
        """
        # The first step finds shapes by running layers once more.
        if self.steps < self._next_profile or not self._pipeline.knows_shapes:
            yield
            self.steps += 1
            return
        with LayerProfiler(self._pipeline, self._optimizer) as profiler:
            yield
        self.steps += 1
        self._balance(profiler.gather())

    def what_if(self) -> RebalancingForecast | None:
        """What moving layers would save now, by the last profile; None before there was one.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        return self._rebalancing.forecast(self._pipeline.boundaries)

    def state_dict(self) -> dict[str, Any]:
        """What was learned of layers, devices and moves; plain values, the same on every rank."""
        repack = {} if self._releasing is None else {"repack": self._releasing.state_dict()}
        return {"steps": self.steps, **self._rebalancing.state_dict(), **repack}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The pipeline may have other boundaries than it had; it keeps them.

        With another number of stages what is known of devices and layers is learned anew.

        Raises:
            ValueError: naming what does not fit, such as another number of layers; nothing is taken over then.
        """
        learned = dict(state)
        steps = learned.pop("steps", None)
        count(steps, "state['steps']")
        repack = learned.pop("repack", {})
        self._rebalancing.load_state_dict(learned, len(self._pipeline.layers), self._pipeline.num_stages)
        if self._releasing is not None:
            self._releasing.load_state_dict(repack)
        self.steps, self._next_profile = steps, 0

    def _balance(self, profile: PipelineProfile) -> None:
        forecast = self._rebalancing.update(profile)
        self._next_profile = self.steps + self._rebalancing.rule.num_steps - 1
        if self._rebalancing.looks_again:
            self._next_profile = self.steps
        if self._release(profile) or forecast is None:
            return
        try:
            report = move_layers(self._pipeline, forecast.after, optimizer=self._optimizer, max_bytes=self._max_bytes)
        except NotEnoughMemoryError as error:
            self._rebalancing.refuse()
            if self._pipeline.stage == 0:
                logger.warning("step %d: layers stay where they are: %s", self.steps, error)
            return
        self._next_profile = self.steps + 1
        self._tell(forecast, report)

    def _release(self, profile: PipelineProfile) -> bool:
        """Whether the pipeline has fewer stages now."""
        if self._releasing is None:
            return False
        released = self._releasing.after(
            profile, self._rebalancing, self._pipeline, self._optimizer, step=self.steps, max_bytes=self._max_bytes
        )
        if self._releasing.looks_again:
            self._next_profile = self.steps
        if released is None:
            return False
        self._next_profile = self.steps + 1
        if self._on_change is not None:
            self._on_change(
                RebalancingRecord(
                    self.steps,
                    released.before,
                    released.report.boundaries,
                    released.stage_s,
                    released.step_s,
                    released.expected_step_s,
                    released.report.moved_bytes,
                    released.report.seconds,
                )
            )
        return True

    def _tell(self, forecast: RebalancingForecast, report: LayerMoveReport) -> None:
        table = torch.zeros(self._pipeline.num_stages, 3, dtype=torch.float64)
        table[self._pipeline.stage] = torch.tensor([report.sent_bytes, report.received_bytes, report.seconds])
        whole = table.to(self._pipeline.meet_device)
        all_reduce(whole, self._pipeline.process_group)
        rows = whole.tolist()
        moved_bytes, seconds = int(sum(sent for sent, *_ in rows)), max(one for *_, one in rows)
        self._rebalancing.learn(max(sent + received for sent, received, _ in rows), seconds)
        if self._pipeline.stage == 0:
            slowest = max(range(len(forecast.stage_s)), key=forecast.stage_s.__getitem__)
            logger.info(
                "step %d: stage %d takes %.1f times as long as the mean: %s: %.1f MB, %.2f s; expected step %.0f -> "
                "%.0f ms",
                self.steps,
                slowest,
                forecast.stage_s[slowest] / (fmean(forecast.stage_s) or 1.0),
                described(forecast.transfers),
                moved_bytes / 1e6,
                seconds,
                1e3 * forecast.step_s,
                1e3 * forecast.expected_step_s,
            )
        if self._on_change is not None:
            self._on_change(
                RebalancingRecord(
                    self.steps,
                    forecast.before,
                    forecast.after,
                    forecast.stage_s,
                    forecast.step_s,
                    forecast.expected_step_s,
                    moved_bytes,
                    seconds,
                )
            )


def _require_no_ties(pipeline: Pipeline) -> None:
    first: dict[int, int] = {}
    for number, layer in enumerate(pipeline.layers):
        for parameter in layer.parameters():
            other = first.setdefault(id(parameter), number)
            if other != number:
                raise ValueError(
                    f"layers {other} and {number} share a parameter, so they cannot be moved one by one: make one "
                    "layer of them and of those between"
                )
