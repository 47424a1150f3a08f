"""What if: the very decisions of a pipeline's balancer, on layers that are numbers, for any number of stages.

``N`` steps, ``L`` layers, ``S`` stages. As in training, a due step is measured on the stages that have the layers, the
figures are known at the end of the next step, and layers move there or, as by default, while the step behind it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from scripts.simulated.pipelines import LayerLoads, PipelineCluster, PipelineTrace, profile_of, trace_of, varied
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import Floats, PipelineLoad, shortest_partition
from zeroresize.policy.pipeline.profile_cadence import ProfileCadence
from zeroresize.policy.pipeline.profiles import LayerCosts, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing, RebalancingProposal, RebalancingRule
from zeroresize.runtime.schedules import Schedule


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
    speeds = cluster.speeds_in(num_steps)
    forward_s, backward_s = varied(loads, cluster)
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
    trace = trace_of(loads, cluster, in_force, num_microbatches, schedule)
    profile_s = decided_s + cluster.profiled_share * float(np.array(trace.step_s)[is_profiled].sum())
    return replace(trace, profile_s=profile_s, move_s=move_s, num_moves=num_moves)


def simulate_oracle(
    loads: LayerLoads, cluster: PipelineCluster, *, num_microbatches: int, schedule: Schedule = "1f1b"
) -> PipelineTrace:
    """Train ``N`` steps, in each with the division that is best for its work and its devices, reached for nothing.

    Nothing is measured, so noise is not known before. Best is as good as search finds it: the division whose slowest
    stage is fastest, refined by simulated steps.
    """
    num_steps = len(loads.forward_s)
    speeds = cluster.speeds_in(num_steps)
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
