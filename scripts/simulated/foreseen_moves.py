"""The most that moves of layers can gain at their price: those of somebody who knows all that is to come.

``N`` steps, ``L`` layers, ``S`` stages, ``P`` spans of steps with the same work and devices, ``C`` divisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scripts.simulated.pipeline_training import (
    LayerLoads,
    PipelineCluster,
    PipelineTrace,
    profile_of,
    speeds_of,
    trace_of,
)
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, PipelineLoad
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.runtime.simulated_steps import simulated_steps, stage_sums

#: Spans at most; work that changes in every step is taken together.
_MOST_SPANS = 16


def simulate_foreseen(
    loads: LayerLoads,
    cluster: PipelineCluster,
    boundaries: Sequence[int],
    *,
    num_microbatches: int,
    delay: int = 0,
) -> PipelineTrace:
    """Train ``N`` steps with the moves that are best by all that is to come.

    A move takes what it takes in :func:`~scripts.simulated.pipeline_training.simulate_pipeline`; nothing is
    measured. Divisions to choose from are the first one and those that are best for the mean work of any neighbouring
    spans; their sequence is the best by dynamic programming. No policy that pays for its moves gains more in the mean,
    but by divisions that are not among these.

    Args:
        boundaries: [S + 1] to begin with.
        delay: steps of a span that pass before layers can be in place: three, where a change must be measured first,
            the figures are known at the end of the next step, and layers move in the step behind it.
    """
    num_steps, num_layers = loads.forward_s.shape
    first = Partition.of(boundaries, num_layers, cluster.num_stages)
    speeds = speeds_of(cluster, num_steps)
    spans = list(itertools.pairwise([*_starts_of_spans(loads, speeds), num_steps]))
    candidates = _divisions(loads, cluster, speeds, spans, num_microbatches) - {first}
    divisions = [first, *sorted(candidates, key=lambda division: division.boundaries)]
    price_s, step_s = _prices(divisions, loads, cluster), _seconds(divisions, loads, speeds, num_microbatches)
    spent_s = np.full(len(divisions), np.inf)
    spent_s[0] = 0.0
    chosen: list[Indices] = []
    for begin, end in spans:
        moved = min(begin + delay, end) if begin else 0
        before_s = spent_s + step_s[begin:moved].sum(axis=0)
        of_moves = before_s[:, None] + price_s
        chosen.append(of_moves.argmin(axis=0))
        spent_s = of_moves.min(axis=0) + step_s[moved:end].sum(axis=0)
    place, in_force, moves_s, num_moves = int(spent_s.argmin()), [first.boundaries] * num_steps, 0.0, 0
    for (begin, end), came_from in reversed(list(zip(spans, chosen, strict=True))):
        before = int(came_from[place])
        moved = min(begin + delay, end) if begin else 0
        in_force[begin:moved] = [divisions[before].boundaries] * (moved - begin)
        in_force[moved:end] = [divisions[place].boundaries] * (end - moved)
        moves_s += float(price_s[before, place])
        num_moves += before != place
        place = before
    return trace_of(loads, cluster, in_force, num_microbatches, "1f1b", move_s=moves_s, num_moves=num_moves)


def _divisions(
    loads: LayerLoads,
    cluster: PipelineCluster,
    speeds: Floats,
    spans: Sequence[tuple[int, int]],
    num_microbatches: int,
) -> set[Partition]:
    """Those that are best for the mean work of neighbouring spans."""
    divisions: set[Partition] = set()
    for (begin, _), (_, end) in itertools.combinations_with_replacement(spans, 2):
        forward, backward, speed = (
            values[begin:end].mean(axis=0) for values in (loads.forward_s, loads.backward_s, speeds)
        )
        load = PipelineLoad.of(forward + backward, cluster.num_stages, speeds=speed)
        divisions.add(shortest_partition(load, forward, backward, num_microbatches, "1f1b"))
    return divisions


def _seconds(divisions: Sequence[Partition], loads: LayerLoads, speeds: Floats, num_microbatches: int) -> Floats:
    """[N, C] of every step by every division."""
    boundaries = np.array([division.boundaries for division in divisions])
    step_s = np.empty((len(speeds), len(divisions)))
    changes = _changes(loads, speeds)
    for step, speed in enumerate(speeds):
        if step and not changes[step - 1]:
            step_s[step] = step_s[step - 1]
            continue
        forward, backward = (
            stage_sums(seconds[step], boundaries) / speed for seconds in (loads.forward_s, loads.backward_s)
        )
        step_s[step] = simulated_steps(forward, backward, num_microbatches)
    return step_s


def _starts_of_spans(loads: LayerLoads, speeds: Floats) -> list[int]:
    """First steps of spans of the same work and devices; evenly spaced ones where there are too many."""
    starts = [0, *(1 + np.flatnonzero(_changes(loads, speeds))).tolist()]
    num_steps = len(speeds)
    return starts if len(starts) <= _MOST_SPANS else [num_steps * span // _MOST_SPANS for span in range(_MOST_SPANS)]


def _changes(loads: LayerLoads, speeds: Floats) -> NDArray[np.bool_]:
    """[N - 1] whether work or devices differ from one step to the next."""
    values = np.concatenate([loads.forward_s, loads.backward_s, speeds], axis=1)
    changes: NDArray[np.bool_] = (np.diff(values, axis=0) != 0.0).any(axis=1)
    return changes


def _prices(candidates: Sequence[Partition], loads: LayerLoads, cluster: PipelineCluster) -> Floats:
    """[C, C] seconds of a move from the row's division to the column's, 0 on the diagonal."""
    profile = profile_of(loads.forward_s[0], loads.backward_s[0], loads.layer_bytes, candidates[0])
    links = cluster.move or cluster.links
    price_s = np.zeros((len(candidates), len(candidates)))
    for (row, before), (column, after) in itertools.permutations(enumerate(candidates), 2):
        price_s[row, column] = links.seconds(profile.bytes_of(before.transfers_to(after)))
    return price_s
