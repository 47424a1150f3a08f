"""What layers take over several profiles, and how heavy layers and slow devices are told apart."""

import dataclasses

import numpy as np
import pytest
from helpers.pipelines import World

from zeroresize.policy.pipeline.profiles import LayerCosts, LayerMeans


def after(world, *changes):
    """What is known after a profile of the world and one more after each change."""
    costs = LayerCosts.first(world.profile())
    for change in changes:
        for name, value in change.items():
            setattr(world, name, value)
        costs = costs.after(world.profile())
    return costs


def test_a_change_of_all_layers_of_a_stage_is_its_devices():
    work = [1.0, 2.0, 2.5, 3.0, 4.0, 1.5]
    costs = after(World(work, [1.0, 1.0], (0, 3, 6)), {"speeds": [1.0, 0.25]})
    assert costs.speeds[0] / costs.speeds[1] == pytest.approx(4.0)
    assert (costs.seconds / costs.seconds[0]).tolist() == pytest.approx(work)


def test_two_layers_that_change_alike_say_nothing_of_their_device():
    costs = after(World([1.0] * 5, [1.0, 1.0], (0, 3, 5)), {"work": [1.0, 1.0, 1.0, 2.0, 2.0]})
    assert costs.speeds == (1.0, 1.0)
    assert costs.seconds.tolist() == pytest.approx([1.0, 1.0, 1.0, 2.0, 2.0])


def test_a_layer_that_is_alone_tells_that_its_device_is_slow_where_nothing_else_has_changed():
    def changed(**change):
        return after(World([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0], (0, 2, 4, 6)), change)

    slow = [0.25, 1.0, 1.0]
    costs = changed(speeds=slow)
    assert costs.speeds[1] / costs.speeds[0] == pytest.approx(4.0)
    assert costs.seconds[1] == pytest.approx(costs.seconds[2])
    assert changed(speeds=slow, work=[0.0, 1.0, 1.0, 1.0, 2.0, 2.0]).speeds == (1.0, 1.0, 1.0)
    assert changed(work=[0.0, 1.2, 1.0, 1.0, 1.0, 1.0]).speeds == (1.0, 1.0, 1.0)


def test_a_slow_device_that_kept_two_layers_is_seen_to_recover():
    world = World([1.0] * 7, [1.0, 1.0], (0, 3, 7))
    slow, fewer = {"speeds": [1.0, 0.25]}, {"boundaries": (0, 5, 7)}
    slowed = after(world, slow, fewer)
    assert slowed.speeds[0] / slowed.speeds[1] == pytest.approx(4.0)
    world = World([1.0] * 7, [1.0, 1.0], (0, 3, 7))
    costs = after(world, slow, fewer, {"speeds": [1.0, 1.0]})
    assert costs.speeds == pytest.approx((1.0, 1.0))
    assert costs.seconds.tolist() == pytest.approx([1.0] * 7)


def test_work_that_changes_differently_in_most_stages_is_no_change_of_devices():
    world = World([1.0] * 12, [1.0, 1.0, 0.5, 1.0], (0, 3, 6, 9, 12))
    pruned = [*[0.3] * 3, *[0.4] * 3, *[0.35] * 3, *[1.0] * 3]
    costs = after(world, {"work": pruned})
    assert costs.speeds == pytest.approx((1.0,) * 4)
    costs = after(world, {"work": pruned}, {"work": pruned, "speeds": [1.0, 1.0, 0.5, 0.5]})
    assert costs.speeds[3] == pytest.approx(0.5 * costs.speeds[2])


def test_work_that_is_known_to_have_changed_is_no_change_of_devices():
    world = World([1.0] * 6, [1.0, 1.0], (0, 3, 6))
    costs = LayerCosts.first(world.profile())
    world.work = [0.3, 0.3, 0.3, 1.0, 1.0, 1.0]
    known = costs.after(world.profile(), is_other_work=True)
    assert known.speeds == (1.0, 1.0) and known.seconds.tolist() == pytest.approx(world.work)
    assert costs.after(world.profile()).speeds[0] > 1.0
    world.boundaries = (0, 2, 6)
    assert costs.after(world.profile(), is_other_work=True).speeds == (1.0, 1.0)


def test_a_layer_that_moved_tells_which_device_is_faster():
    costs = after(World([1.0] * 6, [1.0, 0.5, 1.0], (0, 2, 4, 6)), {"boundaries": (0, 3, 4, 6)})
    assert costs.speeds[0] / costs.speeds[1] == pytest.approx(2.0)
    assert costs.seconds[2:4].tolist() == pytest.approx(costs.seconds[[0, 1]].tolist())


EVEN = (1.0, 1.0)
WORK = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]


def world_of(work=WORK, *, speeds=EVEN, noise=0.0, seed=0):
    return World(list(work), list(speeds), (0, 3, 6), noise=noise, seed=seed)


def mean_after(means, *profiles):
    for profile in profiles:
        known = means.after(profile)
    return seconds_of(known)


def seconds_of(profile):
    return [layer.forward_s + layer.backward_s for layer in profile.layers]


def test_noise_is_averaged():
    world, means = world_of(noise=0.05), LayerMeans(6)
    known = mean_after(means, *(world.profile() for _ in range(16)))
    errors = np.abs(np.array(known) / WORK - 1.025)
    assert errors.max() < 0.02 and errors.mean() < 0.008  # of single profiles it is 0.0125 in the mean


def test_interruptions_are_forgotten_and_changes_for_good_and_drifts_are_followed():
    usual, interrupted = world_of().profile(), world_of([1.0, 2.0, 30.0, 4.0, 1.0, 2.0]).profile()
    other = [1.0, 2.0, 1.5, 4.0, 1.0, 2.0]
    for profiles, expected in (
        ([usual, usual, interrupted, usual], WORK),
        ([interrupted, usual], WORK),
        ([*[usual] * 10, *[world_of(other).profile()] * 2], other),
        ([*[usual] * 10, *[world_of(other).profile()] * 5], other),
    ):
        assert mean_after(LayerMeans(6), *profiles) == pytest.approx(expected)
    drifting = [world_of([1.0 + 0.01 * step, *WORK[1:]]).profile() for step in range(60)]
    assert mean_after(LayerMeans(6), *drifting)[0] == pytest.approx(1.59, rel=0.1)


def test_a_layer_that_has_moved_is_measured_anew():
    means = LayerMeans(6)
    mean_after(means, *[world_of().profile()] * 8)
    moved = dataclasses.replace(world_of(speeds=(1.0, 0.25)), boundaries=(0, 2, 6))
    assert mean_after(means, moved.profile())[2] == pytest.approx(12.0)
