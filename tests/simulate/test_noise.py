"""Noise of simulations: as large, as lasting and as common as was asked for."""

import numpy as np
import pytest

from scripts.simulated.noise import Noise, NoiseSource

NUM_STEPS = 4000


def factors(num_ranks=4, seed=0, **noise):
    source = NoiseSource(Noise(**noise), num_ranks, seed)
    return np.array([source.next_step() for _ in range(NUM_STEPS)])


def correlation(series):
    return np.corrcoef(series[:-1], series[1:])[0, 1]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_normal_noise_has_its_deviation_and_its_correlation_from_step_to_step(rho):
    drawn = factors(deviation=0.05, correlation=rho)
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)
    assert drawn.std() == pytest.approx(0.05, rel=0.1)
    for series in drawn.reshape(NUM_STEPS, -1).T:
        assert correlation(series) == pytest.approx(rho, abs=0.06)
    assert abs(np.corrcoef(drawn[:, 0, 0], drawn[:, 1, 0])[0, 1]) < 0.2, "ranks vary apart"


def test_bursts_last_as_long_and_are_as_strong_as_was_asked_for():
    drawn = factors(num_ranks=1, burst_rate=0.02, burst_steps=7, burst_factors=(1.3, 2.0))[:, 0]
    assert (drawn == drawn[:, :1]).all(), "all of a step is slow"
    is_on = drawn[:, 0] > 1.0
    bounds = np.flatnonzero(np.diff(is_on.astype(int), prepend=0, append=0))
    begins, ends = bounds[::2], bounds[1::2]
    assert (np.isin(ends[:-1] - begins[:-1], [7, 14, 21])).all()
    assert is_on.mean() == pytest.approx(0.02 * 7 / (1 + 0.02 * 7), rel=0.25)
    strengths = drawn[begins, 0]
    assert 1.3 <= strengths.min() < 1.4 and 1.9 < strengths.max() <= 2.0


def test_a_machine_s_ranks_have_their_bursts_in_common():
    drawn = factors(num_ranks=6, burst_rate=0.02, ranks_per_machine=4)[:, :, 0]
    assert (drawn[:, :4] == drawn[:, :1]).all() and (drawn[:, 4] == drawn[:, 5]).all()
    assert (drawn[:, 0] != drawn[:, 4]).any()
