"""What each replica does with its micro-batches: which it gets, in which order stages run them, and their messages.

``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroresize.policy.microbatches.iteration_plan import ReplicaPlan
from zeroresize.policy.microbatches.micro_batch import MicroBatch, MicroBatchCosts, shapes_of
from zeroresize.policy.microbatches.planning_options import PlanningOptions
from zeroresize.policy.microbatches.replicas import shared_by_stages
from zeroresize.policy.microbatches.schedule_choice import shortest_schedule
from zeroresize.runtime.communication import planned_instructions


def replica_plans(
    microbatches: Sequence[MicroBatch], costs: MicroBatchCosts, options: PlanningOptions
) -> list[ReplicaPlan] | None:
    """Return [D] plans of these micro-batches; None where those of a replica do not fit, or were never measured."""
    sizes, lengths_MA = shapes_of(microbatches)
    forward_s, backward_s, activation_bytes, workspace_bytes = costs.prices(sizes, lengths_MA)
    if not (np.isfinite(forward_s) & np.isfinite(backward_s) & np.isfinite(activation_bytes)).all():
        return None
    slowness_DS = options.slowness_DS(costs.num_stages)
    plans = []
    for members, slowness_S in zip(shared_by_stages(forward_s + backward_s, slowness_DS), slowness_DS, strict=True):
        if not members:
            nothing: tuple[tuple[()], ...] = ((),) * costs.num_stages
            plans.append(ReplicaPlan((), nothing, 0.0, (0.0,) * costs.num_stages))
            continue
        chosen = shortest_schedule(
            forward_s[members] * slowness_S,
            backward_s[members] * slowness_S,
            activation_bytes[members],
            [options.memory_limit] * costs.num_stages,
            workspace_bytes[members],
            schedule=options.schedule,
            num_clusters=options.num_clusters,
        )
        if chosen is None:
            return None
        stages = planned_instructions(chosen.orders, forward_s[members] * slowness_S, backward_s[members] * slowness_S)
        plans.append(
            ReplicaPlan(
                tuple(microbatches[member] for member in members),
                tuple(map(tuple, stages)),
                chosen.step_s,
                tuple(chosen.peak_bytes.tolist()),
            )
        )
    return plans
