"""Batches that are divided by speed on paper: once that pays, evenly again when it is over, never for noise."""

import numpy as np
import pytest

from scripts.simulated.batches import BatchCluster, in_turn, simulate_batches, spells
from scripts.simulated.noise import Noise


def courses(*parts):
    """χ [N, R] of so many steps each."""
    return np.concatenate([np.tile(np.array(chi), (number, 1)) for number, chi in parts])


@pytest.mark.parametrize("chi", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slow_rank_is_given_fewer_samples_and_all_again_once_it_has_recovered(num_ranks, chi):
    cluster = BatchCluster(num_ranks, 64 * num_ranks, noise=Noise(0.01))
    alike, slow = [1.0] * num_ranks, [1.0] * (num_ranks - 1) + [chi]
    trace = simulate_batches(cluster, courses((50, alike), (120, slow), (300, alike)))
    even = (64,) * num_ranks
    assert set(trace.counts[:50]) == {even} and trace.counts[-1] == even
    settled_s = cluster.busy_s(trace.counts[169], np.array(slow)).max()
    assert settled_s <= 1.03 * cluster.busy_s(cluster.best(np.array(slow)), np.array(slow)).max()


def test_without_noise_steps_take_what_the_division_in_force_takes_and_a_change_comes_when_nothing_of_it_is_fetched():
    cluster = BatchCluster(2, 16, fixed_s=0.0, optimizer_s=0.0, ahead=7, change_s=5.0)
    trace = simulate_batches(cluster, courses((100, (1.0, 3.0))))
    (change, *_), after = (step for step in range(100) if trace.counts[step] != (8, 8)), trace.counts[-1]
    assert (change - 7 - 2) % 10 == 1  # an exchange is known a step later
    assert after == cluster.best(np.array((1.0, 3.0))) == (12, 4)
    assert trace.off_s == pytest.approx(np.full(100, 3.0))
    assert trace.step_s[change] == pytest.approx(1.5 + 5.0)
    assert trace.num_changes == 1
    assert np.delete(trace.step_s, change) == pytest.approx(np.repeat((3.0, 1.5), (change, 99 - change)))


@pytest.mark.parametrize("noise", [Noise(0.05), Noise(0.02, correlation=0.9)], ids=["white", "correlated"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_changes_nothing(seed, noise):
    trace = simulate_batches(BatchCluster(noise=noise, seed=seed), np.ones((6000, 4)))
    assert trace.per_off <= 1.001


@pytest.mark.parametrize(("least", "exponent"), [(5, 1.1), (20, 1.1), (5, 3.0)])
@pytest.mark.parametrize("seed", range(5))
def test_random_spells_never_cost_more_than_off(seed, least, exponent):
    cluster = BatchCluster(noise=Noise(0.01), seed=seed)
    assert simulate_batches(cluster, spells(6000, 4, seed, least, exponent)).per_off <= 1.005


@pytest.mark.parametrize("spell", [10, 20, 40])
@pytest.mark.parametrize(("ahead", "change_s"), [(4, 0.0), (4, 3.0), (20, 3.0)])
def test_slowness_that_moves_on_faster_than_changes_pay_is_not_chased(spell, ahead, change_s):
    cluster = BatchCluster(noise=Noise(0.01), ahead=ahead, change_s=change_s)
    assert simulate_batches(cluster, in_turn(6000, 4, spell)).per_off <= 1.03
