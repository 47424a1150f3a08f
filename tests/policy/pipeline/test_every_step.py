"""Profiles of every step, simulated: layers follow work that changes, and neither noise nor interruptions move them.

As in training, a profile is known one step late, and layers move during the next step.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers.pipelines import World, rebalancing_of

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import balanced_partition
from zeroresize.policy.pipeline.profiles import LayerProfile

NUM_LAYERS, EVEN, MOVE_S = 16, (0, 4, 8, 12, 16), 0.005


@dataclass
class Run:
    """Seconds of all steps: as they were, moves included; never moved; with the best boundaries in each step."""

    total_s: float = 0.0
    static_s: float = 0.0
    best_s: float = 0.0
    moves: list = field(default_factory=list)


def trained(work_of, num_steps, speeds=(1.0,) * 4, noise=0.0, interrupted=0.0, seed=0):
    """A run in which the layers' work in a step is ``work_of(step, random)`` [L]."""
    random = np.random.default_rng(seed)
    world = World([0.01] * NUM_LAYERS, speeds, EVEN, noise=noise, seed=seed)
    rebalancing, run = rebalancing_of(num_steps=1), Run()
    known, wanted = None, None
    for step in range(num_steps):
        world.work = work_of(step, random)
        run.total_s += world.slowest
        run.static_s += world.load.slowest(Partition(EVEN))
        run.best_s += world.load.slowest(balanced_partition(world.load))
        profile = world.profile()
        for number in np.flatnonzero(random.random(NUM_LAYERS) < interrupted):
            layer = profile.layers[number]
            slow = LayerProfile(10 * layer.forward_s, 10 * layer.backward_s, *[1000] * 4)
            profile = type(profile)(
                (*profile.layers[:number], slow, *profile.layers[number + 1 :]), profile.stage_s, profile.boundaries
            )
        if wanted is not None:
            world.boundaries = wanted.after
            run.moves.append((step, wanted.after))
            run.total_s += MOVE_S
            rebalancing.learn(wanted.num_bytes, MOVE_S)
        usable, known, wanted = known, profile, None
        if usable is not None and usable.boundaries == world.boundaries:
            wanted = rebalancing.update(usable)
    return run


def kept(run):
    """Which share of what could be saved is saved."""
    return (run.static_s - run.total_s) / (run.static_s - run.best_s)


def even(step, random):
    return [0.01] * NUM_LAYERS


def varying(step, random):
    """As by routing of tokens: half as much or half more, by chance."""
    return (0.01 * random.uniform(0.5, 1.5, NUM_LAYERS)).tolist()


def test_noise_chance_and_single_interruptions_move_nothing():
    assert trained(even, 100, noise=0.5).moves == []
    assert trained(varying, 100, noise=0.1).moves == []
    assert trained(even, 100, interrupted=0.006).moves == []


@pytest.mark.parametrize(("period", "least"), [(400, 0.75), (100, 0.3)])
def test_heavy_work_that_wanders_is_followed(period, least):
    def wandering(step, random):
        distance = np.abs(np.arange(NUM_LAYERS) - step / period * NUM_LAYERS % NUM_LAYERS)
        near = np.exp(-((np.minimum(distance, NUM_LAYERS - distance) / 2) ** 2))
        return (0.01 * (1.0 + 4.0 * near) * random.uniform(0.9, 1.1, NUM_LAYERS)).tolist()

    run = trained(wandering, 200, noise=0.05)
    assert kept(run) > least
