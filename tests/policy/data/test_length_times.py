"""What squares of lengths take is fitted from steps, and unknown where these do not tell."""

import math

import numpy as np
import pytest

from zeroresize.policy.data.lengths import LengthTimes


def times_of(squares, *, num_steps=60, noise=0.0, samples=8, constant_s=0.05, spread=1.0):
    draw, times = np.random.default_rng(0), LengthTimes()
    for _ in range(num_steps):
        lengths = np.exp(draw.normal(5.0, spread, size=samples))
        seconds = constant_s + 1e-4 * (lengths.sum() + squares * (lengths**2).sum())
        times.take(float(lengths.sum()), float((lengths**2).sum()), float(seconds * np.exp(draw.normal(0.0, noise))))
    return times


@pytest.mark.parametrize("squares", [0.0, 1e-3, 1e-2])
def test_what_squares_take_is_what_steps_took(squares):
    assert times_of(squares).squares == pytest.approx(squares, rel=1e-6, abs=1e-8)
    assert times_of(squares, noise=0.03, num_steps=128).squares == pytest.approx(squares, rel=0.3, abs=2e-4)


def test_few_steps_or_steps_alike_tell_nothing():
    assert math.isnan(times_of(1e-3, num_steps=10).squares)
    assert math.isnan(times_of(1e-3, spread=0.0).squares)
    equal = LengthTimes()
    for _ in range(60):
        equal.take(8.0, 0.0, 0.1)
    assert math.isnan(equal.squares)
