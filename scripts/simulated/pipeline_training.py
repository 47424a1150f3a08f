"""What if: the very decisions of a pipeline's balancer, on layers that are numbers, for any number of stages.

``N`` steps, ``L`` layers, ``S`` stages. As in training, a due step is measured on the stages that have the layers, the
figures are known at the end of the next step, and layers move there or, as by default, while the step behind it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.pipeline_load import Floats, PipelineLoad
from zeroresize.policy.pipeline.profile_cadence import ProfileCadence
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal, RebalancingRule
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import simulated_steps, stage_sums

#: A network of 100 Gbit/s, roughly, and what ranks take to agree on a move and to install layers.
TYPICAL_LINKS = MoveCost(1e-10, 0.05)


@dataclass(frozen=True)
class LayerLoads:
    """Hold what the layers of a training run cost.

    Attributes:
        forward_s, backward_s: [N, L] seconds of a micro-batch on a device of speed 1.
        layer_bytes: [L] of weights, gradients and optimizer state.
    """

    forward_s: Floats
    backward_s: Floats
    layer_bytes: Floats


@dataclass(frozen=True)
class PipelineCluster:
    """Describe devices, and what balancing takes on them.

    Attributes:
        num_stages: one device each.
        speeds: [N, S]; None for devices that are equally fast at all times.
        links: what moves take by the links between stages, as measured at the start of a training.
        move: what a move really takes; None for what the links promise.
        profiled_share: by how much a step becomes longer where it is measured.
        decision_s: seconds that a decision takes behind a profile.
        search_s: seconds besides, each time that it has to look for the best boundaries.
        noise: relative standard deviation of a layer's measured and real seconds from step to step.
        seed: of the noise.
    """

    num_stages: int
    speeds: Floats | None = None
    links: MoveCost = TYPICAL_LINKS
    move: MoveCost | None = None
    profiled_share: float = 0.0
    decision_s: float = 0.0
    search_s: float = 0.0
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class PipelineTrace:
    """Hold what came of a simulated training.

    Attributes:
        step_s: [N] seconds of each step, without profiles and moves.
        bubble_ratios: [N].
        boundaries: [N] in force in each step.
        profile_s, move_s: seconds that profiles, with decisions, and moves took, in all steps together.
        num_moves: how often layers moved.
    """

    step_s: tuple[float, ...]
    bubble_ratios: tuple[float, ...]
    boundaries: tuple[tuple[int, ...], ...]
    profile_s: float
    move_s: float
    num_moves: int

    @property
    def total_s(self) -> float:
        """Return the seconds of everything."""
        return sum(self.step_s) + self.profile_s + self.move_s

    @property
    def overhead(self) -> float:
        """Share of all seconds that profiles and moves took."""
        return (self.profile_s + self.move_s) / self.total_s if self.total_s else 0.0


def simulate_pipeline(
    loads: LayerLoads,
    cluster: PipelineCluster,
    boundaries: Sequence[int],
    *,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    rule: RebalancingRule | None = None,
    changes: Collection[int] = (),
    move_during_backward: bool = True,
    max_measuring: float = math.inf,
    counts_work: bool = False,
) -> PipelineTrace:
    """Train ``N`` steps.

    Args:
        boundaries: [S + 1] to begin with.
        rule: how layers move; None for a static pipeline. Its ``num_steps`` are those between two profiles, at least.
        changes: steps, from 0, behind which the balancer is told that the work of layers has changed.
        move_during_backward: whether layers travel while the next step runs, so that they are in place one step later.
            All seconds of a move count all the same, as if nothing of it were hidden.
        max_measuring: share of the steps' time that profiles may take, by ``cluster.profiled_share``.
        counts_work: whether a profile tells the mean work since the one before, as where layers count it.
    """
    num_steps, num_layers = loads.forward_s.shape
    now = Partition.of(boundaries, num_layers, cluster.num_stages)
    speeds = speeds_of(cluster, num_steps)
    forward_s, backward_s = _varied(loads, cluster)
    rebalancing = None if rule is None else Rebalancing(rule, cluster.links)
    cadence = ProfileCadence(1 if rule is None else rule.num_steps, max_measuring)
    last_profile, decided_s, unpaid_s = 0, 0.0, 0.0
    measured: PipelineProfile | None = None
    wanted: RebalancingProposal | None = None
    in_force, is_profiled, move_s, num_moves = [], np.zeros(num_steps, dtype=np.bool_), 0.0, 0
    for step in range(num_steps):
        in_force.append(now.boundaries)
        if rebalancing is None:
            continue
        known, measured = measured, None
        moving, wanted = wanted, None
        if step > 0 and cadence.is_due(step):  # the first one finds shapes
            is_profiled[step] = True
            per_batch = num_microbatches / speeds[step][now.stages]
            of_step = forward_s[step], backward_s[step]
            if counts_work:
                of_step = _of_mean_step(of_step, loads, step, last_profile)
            last_profile = step
            measured = profile_of(per_batch * of_step[0], per_batch * of_step[1], loads.layer_bytes, now)
            cadence.measured(step)
            assert rule is not None
            cadence.learn(cluster.profiled_share + unpaid_s / rule.simulated(LayerCosts.first(measured), now).step_s)
            unpaid_s = 0.0
        if moving is None and known is not None and known.boundaries == now.boundaries:
            rebalancing.interval = cadence.blocks_to_next(step + 1)
            num_searches = rebalancing.num_searches
            wanted = rebalancing.update(known, step + 1)
            seconds = cluster.decision_s + cluster.search_s * (rebalancing.num_searches - num_searches)
            decided_s += seconds
            unpaid_s += seconds
            if rebalancing.looks_again and measured is None:
                cadence.look_again(step)
            if not move_during_backward:
                moving, wanted = wanted, None
        if moving is not None:
            now = Partition(moving.after)
            seconds_of_move = (cluster.move or cluster.links).seconds(moving.num_bytes)
            rebalancing.learn(moving.num_bytes, seconds_of_move)
            move_s += seconds_of_move
            num_moves += 1
            cadence.moved(step)
        if step in changes:
            measured = None  # of work that is no more
            if not rebalancing.comes_home:
                wanted = None
            rebalancing.expect_other_work(step + 1)
            cadence.work_changed(step + 1)
    trace = trace_of(loads, cluster, in_force, num_microbatches, schedule, move_s=move_s, num_moves=num_moves)
    profile_s = decided_s + cluster.profiled_share * float(np.array(trace.step_s)[is_profiled].sum())
    return replace(trace, profile_s=profile_s)


def simulate_oracle(
    loads: LayerLoads, cluster: PipelineCluster, *, num_microbatches: int, schedule: Schedule = "1f1b"
) -> PipelineTrace:
    """Train ``N`` steps, in each with the division that is best for its work and its devices, reached for nothing.

    Nothing is measured, so noise is not known before. Best is as good as search finds it: the division whose slowest
    stage is fastest, refined by simulated steps.
    """
    num_steps = len(loads.forward_s)
    speeds = speeds_of(cluster, num_steps)
    best: dict[bytes, tuple[int, ...]] = {}
    in_force = []
    for step in range(num_steps):
        of_step = loads.forward_s[step], loads.backward_s[step], speeds[step]
        key = np.concatenate(of_step).tobytes()
        if key not in best:
            load = PipelineLoad.of(of_step[0] + of_step[1], cluster.num_stages, speeds=speeds[step])
            best[key] = shortest_partition(load, of_step[0], of_step[1], num_microbatches, schedule).boundaries
        in_force.append(best[key])
    return trace_of(loads, cluster, in_force, num_microbatches, schedule)


def _of_mean_step(of_step: tuple[Floats, Floats], loads: LayerLoads, step: int, last: int) -> tuple[Floats, Floats]:
    """Seconds [L] of a step, forward and backward, scaled to those of the mean step since the last profile.

    Of eight steps at least, as in training.
    """
    scaled, begin = [], max(min(last + 1, step - 7), 0)
    for now_L, loads_L in zip(of_step, (loads.forward_s, loads.backward_s), strict=True):
        mean_L = loads_L[begin : step + 1].mean(axis=0)
        has_worked_L = loads_L[step] > 0.0
        scaled.append(np.where(has_worked_L, now_L * mean_L / np.where(has_worked_L, loads_L[step], 1.0), mean_L))
    return scaled[0], scaled[1]


def speeds_of(cluster: PipelineCluster, num_steps: int) -> Floats:
    """Return [N, S] how fast the devices are, 1 unless the cluster says otherwise."""
    return np.ones((num_steps, cluster.num_stages)) if cluster.speeds is None else cluster.speeds


def _varied(loads: LayerLoads, cluster: PipelineCluster) -> tuple[Floats, Floats]:
    """[N, L] seconds of forward and backward as they vary from step to step, on a device of speed 1."""
    random = np.random.default_rng(cluster.seed)
    factors = np.maximum(1.0 + cluster.noise * random.standard_normal(loads.forward_s.shape), 0.1)
    return loads.forward_s * factors, loads.backward_s * factors


def trace_of(
    loads: LayerLoads,
    cluster: PipelineCluster,
    boundaries: Sequence[Sequence[int]],
    num_microbatches: int,
    schedule: Schedule,
    *,
    move_s: float = 0.0,
    num_moves: int = 0,
) -> PipelineTrace:
    """Return what steps take, as noise has it, by the division in force in each of them, [N, S + 1]; no profiles."""
    speeds = speeds_of(cluster, len(boundaries))
    layers_s = _varied(loads, cluster)
    forward_s, backward_s = (stage_sums(seconds, np.array(boundaries)) / speeds for seconds in layers_s)
    steps_s = simulated_steps(forward_s, backward_s, num_microbatches, schedule=schedule)
    busy_s = num_microbatches * (forward_s + backward_s).mean(axis=1)
    bubbles = np.where(steps_s > busy_s, 1.0 - busy_s / np.maximum(steps_s, busy_s), 0.0)
    in_force = tuple(tuple(division) for division in boundaries)
    return PipelineTrace(tuple(steps_s.tolist()), tuple(bubbles.tolist()), in_force, 0.0, move_s, num_moves)


def profile_of(forward_s: Floats, backward_s: Floats, layer_bytes: Floats, partition: Partition) -> PipelineProfile:
    """Return a profile of layers with these seconds of all micro-batches and these bytes, each [L]."""
    layers = tuple(
        LayerProfile(forward, backward, num_bytes // 4, num_bytes // 4, num_bytes // 2, 0)  # as with Adam
        for forward, backward, num_bytes in zip(
            forward_s.tolist(), backward_s.tolist(), layer_bytes.astype(int).tolist(), strict=True
        )
    )
    stage_s = np.add.reduceat(forward_s + backward_s, partition.boundaries[:-1])
    return PipelineProfile(layers, tuple(stage_s.tolist()), partition.boundaries)
