"""A pipeline goes on with fewer stages in a running job, and the other ranks are released.

DynMo, section 3.4: layers are packed onto as few devices as hold them, communicators follow, devices are given back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks
from zeroresize.comm.groups import destroy_side_group, free_group_number, make_side_group
from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.pipeline.moving_layers import participants_of
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import most_bytes
from zeroresize.policy.pipeline.division import PipelineLoad
from zeroresize.policy.pipeline.profiles import LayerCosts, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import RebalancingRule
from zeroresize.policy.pipeline.repacking_decision import Repacking, repacked, repacked_onto_fewest
from zeroresize.resharding.agreement import agreed, meet_prepared
from zeroresize.resharding.parcels import sent_and_received
from zeroresize.resharding.transaction import prepare_transaction, receive_transaction
from zeroresize.utils.checked import checked, integer, real

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """Describes the release of this rank. Ranks are counted over the whole job.

    Attributes:
        rank: this one.
        released: all that are released with it.
        remaining: of its pipeline.
        moved_bytes: that the re-packing has moved, of all ranks together.
        step: after which it was, where that is known.
    """

    rank: int
    released: tuple[int, ...]
    remaining: tuple[int, ...]
    moved_bytes: int
    step: int | None = None


#: Tells the outside of a release, so that the device can be used by others; called on the rank that is released, once
#: it has given everything away. Whatever it takes or raises, the ranks that stay train on.
ReleaseHook = Callable[[Release], object]


@checked(least_stages=integer(1), max_slowdown=real(above=0.0))
@dataclass(frozen=True)
class Repack:
    """Says when a :class:`~zeroresize.pipeline.PipelineBalancer` packs a pipeline onto fewer ranks.

    After each profile as few stages are left as hold the layers within the balancer's ``memory_limits``, as DynMo does
    whenever memory allows. That makes best use of devices, as a pipeline with fewer stages has fewer bubbles: steps per
    second and rank rise. But each step takes longer, unless work has become less. ``max_slowdown`` bounds that: with
    1.0 devices are given back as a model shrinks, and steps never take longer than at the beginning.

    A released rank does not come back in this job, so a profile that wants fewer stages is followed by another one,
    and both must. The loss of the step after which it leaves may be known to it alone, as the last stage: a program
    that shows losses does so before it leaves the loop, or shares them within the block.

    Attributes:
        least_stages: that always stay.
        max_slowdown: how many times as long as in the first profile of all a step may take, as simulated.
        on_release: called on every rank that is released, with a :class:`~zeroresize.pipeline.Release`.

    Raises:
        ValueError: for values that are not allowed.
    """

    least_stages: int = 1
    max_slowdown: float = math.inf
    on_release: Sequence[ReleaseHook] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class RepackingReport:
    """Reports what a re-packing was; the same on every rank but for ``is_released``.

    Attributes:
        is_released: whether this rank has no stage any more.
        stages: that stay, numbered as before.
        boundaries: of the layers over them.
        released, remaining: ranks, counted over the whole job.
        num_layers: how many changed stages.
        moved_bytes: of all ranks together.
        most_bytes: that one rank sent, or received; by which a move is priced.
        seconds: wall time of the slowest rank.
    """

    is_released: bool
    stages: tuple[int, ...]
    boundaries: tuple[int, ...]
    released: tuple[int, ...]
    remaining: tuple[int, ...]
    num_layers: int
    moved_bytes: int
    most_bytes: int
    seconds: float


def repack(
    pipeline: Pipeline,
    optimizer: object | None,
    *,
    num_stages: int | None = None,
    memory_limits: Sequence[float] | None = None,
    profile: PipelineProfile | None = None,
    max_bytes: int = 64 * 2**20,
    on_release: Sequence[ReleaseHook] = (),
    step: int | None = None,
) -> RepackingReport:
    """Leave the pipeline fewer stages, and release the ranks of the others; collective, between two steps::

        report = repack(pipeline, optimizer, num_stages=2)
        if report.is_released:
            break  # out of the training loop
        ...
        dist.destroy_process_group()  # every rank's last line

    Layers move as :func:`~zeroresize.pipeline.move_layers` moves them: with gradients and optimizer state, bit for bit,
    all or nothing. The ranks that stay get a process group of their own, ``pipeline.process_group``: from then on the
    job's default group has members that are gone, so all that a program does with the pipeline's ranks, as collectives
    and checkpoints, must be given this one. Inputs and targets go to the stages that are then the first and the last.

    A released rank holds no tensors of layers any more. It must leave the training loop and end with status 0, which
    ``torchrun`` takes for what it is; where that restarts a job after a failure, all ranks are back. The job's rank 0
    is never released: it may keep the job's store.

    Args:
        optimizer: the only one that steps the pipeline's parameters, given all of them; None for none.
        num_stages: that are to be left; None for as few as ``memory_limits`` allow.
        memory_limits: [S] bytes that layers of each stage may hold, as in
            :class:`~zeroresize.pipeline.PipelineBalancer`.
        profile: of the pipeline as it is; it divides the layers by their seconds, and tells what they hold. Without it
            every layer counts as much as any other, and there can be no limits.
        max_bytes: of messages that this rank sends and receives at once.
        on_release: called on every rank that is released; what they raise is a warning.
        step: how many steps are over, for ``on_release``.

    Raises:
        ValueError: for numbers of stages that are not possible, limits that nothing fits, limits without a profile or
            a profile of other boundaries; and as :func:`~zeroresize.pipeline.move_layers`. The other ranks raise a
            RuntimeError where they were given something else.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in what is wanted, or one dies or fails. After any of
            these everything is as it was, but for what :func:`~zeroresize.pipeline.move_layers` excepts.
    """

    def decided() -> Repacking:
        now, keep = Partition(pipeline.boundaries), stage_that_stays(pipeline)
        if profile is None:
            if num_stages is None or memory_limits is not None:
                raise ValueError("memory_limits, or no num_stages, are not possible without profile=: it tells bytes")
            return repacked(PipelineLoad.of([1.0] * now.num_layers, now.num_stages), now, num_stages, keep)
        if profile.boundaries != pipeline.boundaries:
            raise ValueError(f"the profile is of boundaries {profile.boundaries}, but they are {pipeline.boundaries}")
        limits = None if memory_limits is None else tuple(map(float, memory_limits))
        rule = RebalancingRule("time", pipeline.schedule, pipeline.num_microbatches, 1, memory_limits=limits)
        costs = LayerCosts.first(profile)
        if num_stages is None:
            return repacked_onto_fewest(rule, costs, profile, keep)
        return repacked(rule.load(costs, profile, num_stages), now, num_stages, keep)

    return carry_out_repacking(pipeline, optimizer, decided, max_bytes=max_bytes, on_release=on_release, step=step)


def stage_that_stays(pipeline: Pipeline) -> int | None:
    """Return the stage of the job's rank 0, whose process may keep the job's store; None if it is in another group."""
    ranks = group_ranks(pipeline.process_group)
    return ranks.index(0) if 0 in ranks else None


def carry_out_repacking(
    pipeline: Pipeline,
    optimizer: object | None,
    decide: Callable[[], Repacking],
    *,
    max_bytes: int,
    on_release: Iterable[ReleaseHook],
    step: int | None,
) -> RepackingReport:
    """Re-pack as :func:`repack` does, by a decision that is made on every rank, where it may raise errors."""
    rank = group_ranks(pipeline.process_group)[pipeline.stage]
    report = _move_and_follow(pipeline, optimizer, decide, max_bytes)
    if pipeline.is_released:
        if pipeline.device.type == "cuda":
            torch.cuda.empty_cache()
        release = Release(rank, report.released, report.remaining, report.moved_bytes, step)
        for hook in on_release:
            try:
                hook(release)
            except Exception as error:
                logger.warning(
                    "rank %d is released, but the outside has not been told: %s: %s", rank, type(hook).__name__, error
                )
    return report


def _move_and_follow(
    pipeline: Pipeline, optimizer: object | None, decide: Callable[[], Repacking], max_bytes: int
) -> RepackingReport:
    """All but telling the outside: what this holds of layers that have left is free only when it has returned."""
    begin = time.perf_counter()
    ranks = group_ranks(pipeline.process_group)

    def make() -> LayerMove:
        if pipeline.is_joined:
            raise ValueError("a pipeline with replicas beside it cannot be re-packed: they would keep all stages")
        repacking = decide()
        return LayerMove(pipeline, repacking.partition.boundaries, optimizer, max_bytes, repacking.stages)

    participants = participants_of(pipeline)
    move = prepare_transaction(make, participants)
    receive_transaction(move, participants)
    if len(move.stages) < len(ranks):
        group, seconds = _make_remaining_group(pipeline, move.stages, begin)
        move.install()
        pipeline.follow_to(move.boundaries, group)
    else:
        seconds = max(row[0] for row in pipeline.meet()(time.perf_counter() - begin, 0.0))
        move.commit()
    remaining = tuple(ranks[stage] for stage in move.stages)
    sent, received = sent_and_received(move.parcels, len(ranks))
    return RepackingReport(
        pipeline.is_released,
        move.stages,
        move.boundaries,
        tuple(one for one in ranks if one not in remaining),
        remaining,
        move.num_layers,
        sum(sent),
        int(most_bytes(sent, received)),
        seconds,
    )


def _make_remaining_group(pipeline: Pipeline, stages: Sequence[int], begin: float) -> tuple[ProcessGroup | None, float]:
    """Make the group of the stages that stay, on all ranks or on none; and the slowest rank's seconds; collective."""
    meet, made = pipeline.meet(), list[ProcessGroup]()
    what = "the group of the stages that stay"
    free = [number for number, *_ in meet_prepared(meet, (float(free_group_number()), 0.0), what, moves=True)]

    def make() -> None:
        if pipeline.stage in stages:
            made.append(make_side_group(pipeline.process_group, stages, int(max(free))))

    try:
        _, table = agreed(meet, make, lambda _: (time.perf_counter() - begin, 0.0), what=what, moves=True)
    except Exception:
        for group in made:
            destroy_side_group(group)
        raise
    return next(iter(made), None), max(seconds for seconds, *_ in table)
