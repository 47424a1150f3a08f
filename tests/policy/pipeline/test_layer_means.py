"""What layers take, over several profiles."""

import dataclasses

import numpy as np
import pytest
from helpers.pipelines import World

from zeroresize.policy.pipeline.layer_means import LayerMeans

EVEN = (1.0, 1.0)
WORK = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]


def world_of(work=WORK, *, speeds=EVEN, noise=0.0, seed=0):
    return World(list(work), list(speeds), (0, 3, 6), noise=noise, seed=seed)


def after(means, *profiles):
    for profile in profiles:
        known = means.after(profile)
    return seconds_of(known)


def seconds_of(profile):
    return [layer.forward_s + layer.backward_s for layer in profile.layers]


def test_noise_is_averaged():
    world, means = world_of(noise=0.05), LayerMeans(6)
    known = after(means, *(world.profile() for _ in range(16)))
    errors = np.abs(np.array(known) / WORK - 1.025)
    assert errors.max() < 0.012  # three standard deviations of 0.05 / √12 / √16; half of single profiles are beyond


def test_an_interruption_of_one_profile_is_forgotten():
    means, usual = LayerMeans(6), world_of().profile()
    interrupted = world_of([1.0, 2.0, 30.0, 4.0, 1.0, 2.0]).profile()
    assert after(means, usual, usual, interrupted) == pytest.approx(WORK)
    assert after(means, usual) == pytest.approx(WORK)


def test_the_first_profile_is_not_trusted_more_than_the_second():
    means, interrupted = LayerMeans(6), world_of([1.0, 2.0, 30.0, 4.0, 1.0, 2.0]).profile()
    after(means, interrupted)
    assert after(means, world_of().profile()) == pytest.approx(WORK)


def test_a_change_for_good_is_followed_by_two_profiles_and_leaves_no_trace():
    means, usual = LayerMeans(6), world_of().profile()
    other = [1.0, 2.0, 1.5, 4.0, 1.0, 2.0]
    after(means, *[usual] * 10)
    assert after(means, *[world_of(other).profile()] * 2) == pytest.approx(other)
    assert after(means, *[world_of(other).profile()] * 3) == pytest.approx(other)


def test_what_drifts_is_followed():
    means = LayerMeans(6)
    for step in range(60):
        known = after(means, world_of([1.0 + 0.01 * step, 2.0, 3.0, 4.0, 1.0, 2.0]).profile())
    assert known[0] == pytest.approx(1.59, rel=0.1)


def test_what_surprises_is_said_at_once():
    means, usual = LayerMeans(6), world_of().profile()
    after(means, *[usual] * 4)
    noisy = [1.05, 2.0, 6.0, 4.0, 1.0, 2.0]
    surprised = seconds_of(means.surprised(world_of(noisy).profile()))
    assert surprised == pytest.approx([1.0, 2.0, 6.0, 4.0, 1.0, 2.0])  # 5 % are noise, twice as long is not


def test_the_noise_that_there_is_does_not_surprise():
    world, means = world_of(noise=0.15), LayerMeans(6)
    for _ in range(20):
        after(means, world.profile())
    known = seconds_of(means.surprised(world.profile()))
    again = seconds_of(means.surprised(world.profile()))
    assert known == again  # the means, whatever each of them says


def test_a_layer_that_has_moved_is_measured_anew():
    means = LayerMeans(6)
    after(means, *[world_of().profile()] * 8)
    moved = dataclasses.replace(world_of(speeds=(1.0, 0.25)), boundaries=(0, 2, 6))
    assert after(means, moved.profile())[2] == pytest.approx(12.0)


def test_bytes_are_those_of_the_last_profile():
    means = LayerMeans(6)
    usual = world_of().profile()
    after(means, usual)
    larger = dataclasses.replace(
        usual, layers=tuple(dataclasses.replace(layer, weight_bytes=77) for layer in usual.layers)
    )
    assert {layer.weight_bytes for layer in means.after(larger).layers} == {77}
