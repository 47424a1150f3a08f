"""Pipelines whose layers are numbers: what layers cost, on which devices, and how long steps are by a division of them.

``N`` steps, ``L`` layers, ``S`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import Floats
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
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

    def speeds_in(self, num_steps: int) -> Floats:
        """Return [N, S] how fast the devices are."""
        return np.ones((num_steps, self.num_stages)) if self.speeds is None else self.speeds


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


def varied(loads: LayerLoads, cluster: PipelineCluster) -> tuple[Floats, Floats]:
    """Return [N, L] seconds of forward and backward as they vary from step to step, on a device of speed 1."""
    random = np.random.default_rng(cluster.seed)
    factors = np.maximum(1.0 + cluster.noise * random.standard_normal(loads.forward_s.shape), 0.1)
    return loads.forward_s * factors, loads.backward_s * factors


def trace_of(
    loads: LayerLoads,
    cluster: PipelineCluster,
    boundaries: Sequence[Sequence[int]],
    num_microbatches: int,
    schedule: Schedule,
) -> PipelineTrace:
    """Return what steps take, as noise has it, by the division in force in each, [N, S + 1]: no profiles, no moves."""
    speeds = cluster.speeds_in(len(boundaries))
    layers_s = varied(loads, cluster)
    forward_s, backward_s = (stage_sums(seconds, np.array(boundaries)) / speeds for seconds in layers_s)
    steps_s = simulated_steps(forward_s, backward_s, num_microbatches, schedule=schedule)
    busy_s = num_microbatches * (forward_s + backward_s).mean(axis=1)
    bubbles = np.where(steps_s > busy_s, 1.0 - busy_s / np.maximum(steps_s, busy_s), 0.0)
    in_force = tuple(tuple(division) for division in boundaries)
    return PipelineTrace(tuple(steps_s.tolist()), tuple(bubbles.tolist()), in_force, 0.0, 0.0, 0)


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
