"""Keeps the stages of a pipeline equally long while it is trained: measures, decides, moves layers, releases ranks."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import as_process_group
from zeroresize.comm.pausing import Pausable
from zeroresize.layers.whole_parameters import require_references_within_stages, require_whole_parameters
from zeroresize.measure.links import measure_move_cost
from zeroresize.optim.independence import why_not_by_parameter
from zeroresize.pipeline.layer_contents import extra_state_of
from zeroresize.pipeline.measuring import CountWork, Measuring, StageLinks, WorkCounter
from zeroresize.pipeline.moving_layers import LayerMoveReport, MoveDuringBackward, move_layers, moving_during_backward
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.records import ProfileRecord
from zeroresize.pipeline.repacking import Repack, RepackingReport, carry_out_repacking, stage_that_stays
from zeroresize.pipeline.replicas import PipelineReplicas, StageUnits, have_settled, leave_layers
from zeroresize.policy.moves.move_cost import MoveCost, most_bytes
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.policy.pipeline.division import NothingFitsError
from zeroresize.policy.pipeline.profile_cadence import MAX_MEASURING, ProfileCadence, ProfileEvery
from zeroresize.policy.pipeline.profiles import LayerCosts, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import (
    By,
    Rebalancing,
    RebalancingProposal,
    RebalancingRule,
    RebalancingState,
    described,
)
from zeroresize.policy.pipeline.repacking_decision import RepackingDecision
from zeroresize.resharding.agreement import (
    ARGUMENTS,
    CannotMoveError,
    NotEnoughMemoryError,
    make_alike,
    meet_prepared,
)
from zeroresize.resharding.parameter_state import groups_of, require_movable_state
from zeroresize.status import Status, ranks_by_speed
from zeroresize.telemetry import ChangeRecord
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.texts import duration_text, size_text

logger = logging.getLogger(__name__)

_OPTIONS = (
    "the options of PipelineBalancer, or in the parameter groups of the optimizer: give every rank's all of "
    "pipeline.parameters(), in the same groups"
)


@dataclass(frozen=True)
class _State:
    """What a balancer goes on from; ``costs_of_profiles`` in steps."""

    steps: int
    costs_of_profiles: tuple[float, ...]
    rebalancing: RebalancingState
    repacking: RepackingDecision


@checked(
    tell=lambda given, error: meet_prepared(given["pipeline"].meet(), error, ARGUMENTS),
    profile_every=integer(1),
    max_measuring=real(above=0.0, or_infinite=True),
    memory_limits=real(above=0.0, or_infinite=True),
    min_saving=real(least=0.0, below=1.0),
    max_bytes=integer(1),
)
class PipelineBalancer(Pausable):
    """Moves layers to other stages where that makes steps shorter by more than it takes::

        balancer = PipelineBalancer(pipeline, optimizer)
        for inputs, target in batches:
            optimizer.zero_grad()
            with balancer.step():
                pipeline.step(inputs, target=target)
            optimizer.step()

    In a block that is due every layer is measured: the second one, from there on as often as that costs no more than
    ``max_measuring``, the one after next behind a move, and once more where a profile wants a move. The figures travel
    while the next block runs, on a group of their own. At its end all ranks have them, decide alike, and move layers
    with gradients and optimizer state: while the next block runs, or at once. In all other blocks nothing happens, but
    that work is counted where ``count_work`` asks for it.

    What a profile costs is measured, too: by how much longer its block keeps the processor busy than others, and what
    is spent on sending, reading and deciding.

    With ``profile_every=1`` and ``max_measuring=math.inf`` every block is measured.

    A stage that becomes slow gets fewer layers, and gets them back when it recovers; see
    :mod:`zeroresize.policy.pipeline.profiles` for how slow devices and heavy layers are told apart.

    Its constructor is collective, and so are the blocks.

    Args:
        optimizer: the only one that steps the pipeline's parameters; None for none.
        profile_every: least number of blocks from one profile to the next, or "auto" for as many as ``max_measuring``
            wants, 10 to 1,000.
        max_measuring: share of the steps' time that measuring may cost, unless it takes over 1,000 times as much;
            ``math.inf`` for any. Until the cost is known, after two profiles, ten blocks lie between two at least. What
            :meth:`profile_next` asks for is measured at once, unless four such changes in a row have moved nothing.
        count_work: for work that changes in every step, as with routing: ``count_work(layer)`` returns how much a layer
            did in the block that is over, in any unit that its seconds are proportional to, and begins anew; it is
            called for each layer of this rank behind every block, and must not wait for a device. "tokens" counts the
            rows (tokens) that modules with matrices are given, times the matrices' elements, by hooks that stay; not
            for compiled layers. A profile then tells the seconds of the mean block since the one before. None for no
            counting.
        by: what is divided evenly: measured seconds, or bytes of parameters. Either way layers move only where steps
            become shorter.
        memory_limits: [S] bytes that layers of each stage may hold: weights, gradients, optimizer state and
            activations, these as if the stage kept as many micro-batches as the first one. Where no division fits,
            layers stay where they are, with a warning.
        min_saving: share of a step that a change must save at least.
        measure_links: whether every profile measures the links between stages, too, so that divisions count with what
            messages take there, as where stages are on several nodes and bandwidth changes. Stages then wait for
            their messages in 1F1B as :mod:`~zeroresize.policy.pipeline.division` says.
        max_bytes: of messages at once in a move, as in :func:`~zeroresize.pipeline.move_layers`.
        move_during_backward: whether layers travel while the next block runs
            (:func:`~zeroresize.pipeline.moving_during_backward`), or at its end where memory does not suffice before;
            or at the end of this one, as always with ``units``.
        replicas: the ranks that are this stage in pipelines of the same layers beside this one, of data parallelism or
            of tensor parallelism within stages; None where there are none. All of them then move the same layers, by
            the slowest of them, or none does: the constructor and due blocks are collective over all.
        units: balances the tensor-parallel group of this rank's stage, and acts first: layers are measured, and move,
            only when no units are about to. Give the group as ``replicas``; where it has several ranks, that is
            required. None where stages are single ranks.
        on_change: is given a :class:`~zeroresize.telemetry.ChangeRecord` after each change, and each for
            which memory did not suffice, on every rank.
        on_profile: is given a :class:`ProfileRecord` after each profile, on every rank.
        repack: whether, and when, the pipeline goes on with fewer stages (:func:`~zeroresize.pipeline.repack`); None
            for never. A rank that is released must leave the loop behind the block: ``if pipeline.is_released: break``.

    Attributes:
        steps: how many blocks are over.

    Raises:
        ValueError: for values that are not allowed; for layers that refer to parameters of others, or that are inside
            DistributedDataParallel or FSDP, and for an optimizer that is a wrapper, does not step all parameters that
            want gradients, or is not known to step each by itself (LBFGS).
        RuntimeError: on every rank, if ranks differ in these values or in the optimizer's parameter groups.
        ValueError, RuntimeError: as :class:`~zeroresize.pipeline.replicas.PipelineReplicas`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        profile_every: ProfileEvery = "auto",
        max_measuring: float = MAX_MEASURING,
        count_work: CountWork | None = None,
        by: By = "time",
        memory_limits: Sequence[float] | None = None,
        min_saving: float = MIN_SAVING,
        measure_links: bool = False,
        max_bytes: int = 64 * 2**20,
        move_during_backward: bool = True,
        replicas: ProcessGroup | DeviceMesh | None = None,
        units: StageUnits | None = None,
        on_change: Callable[[ChangeRecord], object] | None = None,
        on_profile: Callable[[ProfileRecord], object] | None = None,
        repack: Repack | None = None,
    ) -> None:
        self.steps = 0
        self._pipeline, self._optimizer, self._units, self._repack = pipeline, optimizer, units, repack
        self._max_bytes, self._on_change, self._on_profile = max_bytes, on_change, on_profile
        self._moves_during_backward = move_during_backward and units is None
        self._wanted: RebalancingProposal | None = None
        self._has_warned = False  # that nothing fits
        self._advised: tuple[int, ...] | None = None
        self._steps_of_block = 1
        self._cadence = cadence = ProfileCadence(profile_every, max_measuring)

        def checked() -> tuple[WorkCounter, RebalancingRule, ProcessGroup | None, str, list[int | None]]:
            limits = None if memory_limits is None else tuple(map(float, memory_limits))
            if limits is not None and len(limits) != pipeline.num_stages:
                raise ValueError(f"memory_limits are {len(limits)}, not one of each of {pipeline.num_stages} stages")
            if repack is not None and limits is None and repack.max_slowdown == math.inf:
                raise ValueError("repack needs memory_limits, or a max_slowdown: nothing else would keep any stage")
            if repack is not None and (replicas is not None or units is not None):
                raise ValueError("repack is for pipelines by themselves: not with replicas or units beside them")
            replicas_group = as_process_group(replicas)
            if units is not None and replicas is None and units.num_ranks > 1:
                raise ValueError(f"units of {units.num_ranks} ranks need these ranks as replicas=")
            counter = WorkCounter(pipeline, count_work)
            groups = _movable_groups(pipeline, optimizer)
            measures_all = profile_every == 1 and max_measuring == math.inf
            num_steps = 1 if measures_all else max(cadence.least, 2)
            rule = RebalancingRule(by, pipeline.schedule, pipeline.num_microbatches, num_steps, min_saving, limits)
            options = (
                f"{rule}, {cadence}, count_work={'a function' if callable(count_work) else count_work}, "
                f"measure_links={measure_links}, max_bytes={max_bytes}, move_during_backward={move_during_backward}"
            )
            return counter, rule, replicas_group, options, groups

        counter, rule, replicas_group, options, _ = make_alike(
            pipeline.meet(),
            checked,
            lambda made: [made[-2], replicas is None, units is None, str(repack), made[-1]],
            "a PipelineBalancer",
            _OPTIONS,
        )
        self._replicas: PipelineReplicas | None = None
        if replicas_group is not None:
            self._replicas = PipelineReplicas(pipeline, replicas_group, options)
            pipeline.replicas = replicas_group  # what counts in a step is that of all of them
        self._links = StageLinks(pipeline, self._replicas) if measure_links else None
        # Where every step may be measured, only what decisions need is.
        counts = rule.num_steps > 1 or rule.memory_limits is not None
        self._measuring = Measuring(pipeline, optimizer, cadence, counter, self._replicas, counts_activations=counts)
        self.restraint = self._measuring.restraint
        self._connect()
        self._rebalancing = Rebalancing(rule, self._measure_cost())
        self._rebalancing.interval = cadence.every
        self._repacking = (
            RepackingDecision() if repack is None else RepackingDecision(repack.least_stages, repack.max_slowdown)
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose the ``pipeline.step`` calls of one step of the optimizer in a block; collective.

        Layers are where they were until its end, and may be elsewhere behind it.

        Raises:
            RuntimeError, ValueError: at the beginning or the end, as :func:`~zeroresize.pipeline.move_layers`; at the
                end if the profile of a rank does not come, or if ``count_work`` failed on one.
        """
        self._measuring.begin_block()
        knows_shapes = self._pipeline.knows_shapes
        # The first step finds shapes by running layers once more.
        is_due = self._cadence.is_due(self.steps) and knows_shapes and not self._units_move()
        profiler = self._measuring.new_profiler() if is_due and self.restraint.state != "off" else None
        wanted, self._wanted = self._wanted, None
        is_usual, is_over, move = wanted is None and knows_shapes, False, None
        if wanted is not None and (self._is_paused() or wanted.before != self._pipeline.boundaries):
            wanted = None  # or somebody else has moved layers
        try:
            with ExitStack() as around:
                if wanted is not None:
                    move = self._begin_move(wanted, around)
                if profiler is not None:
                    around.enter_context(profiler)
                num_steps = self._pipeline.num_steps
                yield
                self._steps_of_block = max(self._pipeline.num_steps - num_steps, 1)
                is_over = True
        except NotEnoughMemoryError as error:
            if not is_over:
                raise
            if wanted is not None:
                self._stay(wanted, error)
            wanted = None
        self._measuring.end_block(profiler, is_due=is_due, is_usual=is_usual)
        if is_due:
            self._cadence.measured(self.steps)
        self.steps += 1
        if move is not None and move.report is not None and wanted is not None:
            self._finish_move(wanted, move.report)
        elif wanted is not None:
            self._move(wanted)
        profile = self._measuring.exchange(self.steps)
        if profile is not None:
            self._rebalancing.interval = self._cadence.blocks_to_next(self.steps)
            if profile.boundaries == self._pipeline.boundaries:
                self._balance(profile)

    def profile_next(self) -> None:
        """Measure layers in the next two blocks, as their work has changed; to be called on every rank alike.

        What is then measured is put down to the layers, not to their devices. Moves and releases that were decided, or
        had yet to be confirmed, are not made: they were for the work that is no more.
        """
        if not self._rebalancing.comes_home:
            self._wanted = None
        self._measuring.forget_work()
        self._rebalancing.expect_other_work(self.steps)
        self._cadence.work_changed(self.steps)
        self._repacking.expect_other_work()

    def what_if(self) -> RebalancingProposal | None:
        """Return what moving layers would save now, by the last profile; None before there was one.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        return self._rebalancing.propose(self._pipeline.boundaries)

    def status(self) -> Status:
        """Return how fast stages are, how many layers each has, and what was decided and why; the same on every rank.

        Printed it is a table, also in a notebook; its ranks are stages. Seconds are those of a profiled block.
        """
        costs, proposal = self._rebalancing.costs, self.what_if()
        boundaries, num_stages = self._pipeline.boundaries, self._pipeline.num_stages
        speeds = () if costs is None else costs.speeds
        even_s = math.nan if costs is None else math.fsum(costs.seconds) / num_stages / max(speeds)
        shares = [num_stages * (end - begin) / boundaries[-1] for begin, end in itertools.pairwise(boundaries)]
        return Status(
            kind="layers",
            state=self.restraint.state,
            step=self.steps,
            time=time.time(),
            step_s=math.nan,
            expected_step_s=math.nan if proposal is None else proposal.step_s,
            even_step_s=math.nan,
            saved_s=math.nan,
            cost_s=0.0,
            ranks=ranks_by_speed(speeds, shares if speeds else (), even_s),
            decided="" if proposal is None else proposal.reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned of layers, devices, moves and costs: plain values, the same on every rank."""
        return saved(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The pipeline may have other boundaries than it had; it keeps them.

        With another number of stages what is known of devices and layers is learned anew.

        Raises:
            ValueError: naming what does not fit, such as another number of layers; nothing is taken over then.
        """
        learned = loaded(_State, state, "state", self._state)
        rebalancing = learned.rebalancing.on(len(self._pipeline.layers), self._pipeline.num_stages)
        self._rebalancing.go_on_from(rebalancing)
        self._repacking = learned.repacking
        self._measuring.forget_work()
        self.steps, self._wanted = learned.steps, None
        self._cadence.begin_anew(learned.costs_of_profiles)
        self._rebalancing.interval = self._cadence.every

    @property
    def _state(self) -> _State:
        return _State(self.steps, self._cadence.costs, self._rebalancing.state, self._repacking)

    def _balance(self, profile: PipelineProfile) -> None:
        """Decide after a profile, and carry that out, keep it for the next block, or only tell it."""
        rental = self._rebalancing.state.rental
        owed, proposal = dict(vars(rental)), self._decide(profile)
        if self.restraint.state == "advice":
            if proposal is not None and proposal.after != self._advised:
                self._advised = proposal.after
                self._stay(proposal, f"by advice only {described(proposal.transfers)}: {proposal.reason}")
            vars(rental).update(owed)  # it is still due
            return
        self._advised = None
        if self._release(profile) or proposal is None:
            return
        if self._units_move():  # they have begun since the profile was measured
            self._rebalancing.drop()
        elif self._moves_during_backward:
            self._wanted = proposal
        else:
            self._move(proposal)

    def _decide(self, profile: PipelineProfile) -> RebalancingProposal | None:
        messages = proposal = None
        if self._links is not None and self._pipeline.knows_shapes:
            with self._measuring.seconds.handling(by_wall=True):
                messages = self._links.measure(self._steps_of_block)
        with self._measuring.seconds.handling():
            if self._replicas is not None:
                profile = self._replicas.gather_slowest(profile)
            if self._on_profile is not None:
                rule, cadence = self._rebalancing.rule, self._cadence
                record = ProfileRecord.of(
                    self.steps, profile, rule.schedule, rule.num_microbatches, cadence.every, cadence.cost
                )
                self._on_profile(record)
            try:
                proposal = self._rebalancing.update(profile, self.steps, messages)
            except NothingFitsError as error:  # on every rank; training does not need layers to move
                if self._measuring.tells and not self._has_warned:
                    logger.warning("step %d: layers stay where they are: %s", self.steps, error)
                self._has_warned = True
        if self._rebalancing.looks_again:
            self._look_again()
            if self._units is not None:
                self._units.watch()
        return proposal

    def _look_again(self) -> None:
        """Measure the next block to confirm the last profile, unless another profile is on its way already."""
        if not self._measuring.is_under_way:
            self._cadence.look_again(self.steps - 1)

    def _move(self, proposal: RebalancingProposal) -> None:
        """Between two steps."""
        try:
            if self._units is not None:
                leave_layers(self._units, proposal.after, self._pipeline.meet())
        except (CannotMoveError, NotEnoughMemoryError) as error:
            self._stay(proposal, error)
            return
        report = None
        try:
            report = move_layers(self._pipeline, proposal.after, optimizer=self._optimizer, max_bytes=self._max_bytes)
        except NotEnoughMemoryError as error:
            self._stay(proposal, error)
        except (ValueError, CannotMoveError):  # on every rank: nothing has moved
            if self._units is not None:
                self._units.attach()
            raise
        if self._units is not None:
            self._units.attach()
        if report is not None:
            self._finish_move(proposal, report)

    def _begin_move(self, proposal: RebalancingProposal, around: ExitStack) -> MoveDuringBackward | None:
        """None where not all fits beside what the block computes with."""
        move = moving_during_backward(
            self._pipeline,
            proposal.after,
            optimizer=self._optimizer,
            num_steps=self._steps_of_block,
            max_bytes=self._max_bytes,
        )
        try:
            return around.enter_context(move)
        except NotEnoughMemoryError as error:
            if self._measuring.tells:
                logger.info("step %d: layers do not move before the end of the step: %s", self.steps, error)
            return None

    def _is_paused(self) -> bool:
        """Whether balancing is, by what ranks wish now, so that the move that is due is dropped; collective."""
        wishes = [wish for wish, *_ in self._pipeline.meet()(self.restraint.wish())]
        self.restraint.agree(wishes, self.steps, tells=self._measuring.tells)
        if self.restraint.state != "on":
            self._rebalancing.drop()
        return self.restraint.state != "on"

    def _stay(self, proposal: RebalancingProposal, error: RuntimeError | str) -> None:
        self._rebalancing.refuse()
        if self._measuring.tells:
            logger.warning("step %d: layers stay where they are: %s", self.steps, error)
        self._record(proposal, described(proposal.transfers), 0, proposal.price_s / 2.0, is_made=False)

    def _finish_move(self, proposal: RebalancingProposal, report: LayerMoveReport) -> None:
        self._cadence.moved(self.steps - 1)
        self._measuring.seconds.forget()
        rows = self._pipeline.meet()(report.seconds, report.sent_bytes, report.received_bytes)
        seconds, sent, received = zip(*rows, strict=True)
        # Stages come to a move one after the other, as their steps end, and end it together.
        num_stages = self._pipeline.num_stages
        of_pipelines = [seconds[begin : begin + num_stages] for begin in range(0, len(seconds), num_stages)]
        slowest_s = max(map(min, of_pipelines))
        self._rebalancing.learn(most_bytes(sent, received), slowest_s)
        self._record(proposal, described(proposal.transfers), int(sum(sent)), slowest_s)

    def _release(self, profile: PipelineProfile) -> bool:
        """Whether the pipeline has fewer stages now; what moves cost is not learned: most is making a process group."""
        if self._repack is None:
            return False
        with self._measuring.seconds.handling():
            wanted = self._repacking.update(profile, self._rebalancing, stage_that_stays(self._pipeline))
            if self._repacking.looks_again:
                self._look_again()
            if wanted is None:
                return False
            repacking, proposal = wanted
            tells = self._measuring.tells
            try:
                report = carry_out_repacking(
                    self._pipeline,
                    self._optimizer,
                    lambda: repacking,
                    max_bytes=self._max_bytes,
                    on_release=self._repack.on_release,
                    step=self.steps,
                )
            except NotEnoughMemoryError as error:
                self._repacking.rental.refuse()
                if tells:
                    logger.warning("step %d: no rank is released: %s", self.steps, error)
                return False
        text = (
            f"{len(report.stages)} of {len(proposal.stage_s)} stages go on, ranks {list(report.released)} are released"
        )
        costs = self._rebalancing.costs  # of all stages; the record comes last, as on_change may ask for a status
        self._follow(report)
        self._record(proposal, text, report.moved_bytes, report.seconds, report.released, costs=costs)
        return True

    def _follow(self, report: RepackingReport) -> None:
        """Go on with the stages that are left."""
        self._repacking.rental.succeed()
        self._rebalancing.continue_on(report.stages, report.boundaries)
        self._cadence.moved(self.steps - 1)
        self._wanted = None
        self._measuring.seconds.forget()
        self._measuring.disconnect()
        if not self._pipeline.is_released:
            self._connect()

    def _record(
        self,
        proposal: RebalancingProposal,
        what: str,
        moved_bytes: int,
        seconds: float,
        released: tuple[int, ...] = (),
        *,
        costs: LayerCosts | None = None,
        is_made: bool = True,
    ) -> None:
        """Tell what has moved, or could not, in the log and to the user."""
        costs, reason = costs or self._rebalancing.costs, proposal.reason
        if self._measuring.tells and is_made:
            took = f"{size_text(moved_bytes)}, {duration_text(seconds)}"
            logger.info("step %d: %s: %s; %s", self.steps, what, took, reason)
        if self._on_change is None:
            return
        record = ChangeRecord(
            kind="layers",
            step=self.steps,
            what=what,
            left_out=released,
            speeds=() if costs is None else costs.speeds,
            before=proposal.before,
            after=proposal.after,
            step_s=proposal.step_s,
            expected_step_s=proposal.expected_step_s,
            change_s=seconds,
            moved_bytes=moved_bytes,
            is_made=is_made,
            reason=reason,
        )
        self._on_change(record)

    def _units_move(self) -> bool:
        """Collective where stages are groups."""
        return self._units is not None and not have_settled(self._units, self._pipeline.meet())

    def _connect(self) -> None:
        """Make the groups that messages beside the pipeline's own take; collective."""
        self._measuring.connect()
        if self._moves_during_backward:
            self._pipeline.open_side_group()

    def _measure_cost(self) -> MoveCost:
        """Of moves, by the links that layers travel over; collective, and alike in all pipelines."""
        channel = self._pipeline.open_side_group() if self._moves_during_backward else None
        measured = measure_move_cost(self._pipeline.process_group, self._pipeline.device, channel)
        if self._replicas is None:
            return measured
        return MoveCost(*self._replicas.gather_most(measured.seconds_per_byte, measured.fixed_s))


def _movable_groups(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> list[int | None]:
    """The number of each parameter's group in the optimizer, None for those in none.

    Raises:
        ValueError: for layers, or an optimizer, with which layers cannot move.
    """
    layers = list(pipeline.layers)
    try:
        require_references_within_stages(layers, range(len(layers)))
    except ValueError as error:
        raise ValueError(f"layers cannot be moved one by one, so make one of those: {error}") from error
    require_whole_parameters(layers)
    for number in pipeline.present:
        extra_state_of(number, layers[number])
    if require_movable_state(optimizer, dict(pipeline.named_parameters())) is None:
        return []
    reason = why_not_by_parameter(optimizer, pipeline.parameters())
    if reason is not None:
        raise ValueError(f"layers cannot move to other stages: {reason}")
    groups = groups_of(optimizer)
    return [groups.get(id(each)) for each in pipeline.parameters()]
