"""Noise is averaged, jumps are followed, and small changes must be wanted twice."""

import math

import pytest

from zeroresize.policy.smoothing import smoothed, steadied


def test_smoothing_keeps_missing_averages_noise_and_follows_jumps():
    assert math.isnan(smoothed(math.nan, math.nan, 0.7))
    assert smoothed(1.0, math.nan, 0.7) == 1.0
    assert smoothed(math.nan, 2.0, 0.7) == 2.0
    assert smoothed(1.0, 1.1, 0.7) == pytest.approx(1.07)
    assert smoothed(1.0, 4.0, 0.7) == 4.0


def test_small_changes_of_the_ratio_must_be_wanted_twice():
    assert steadied(0.5, 0.55, 0.50, 0.02) == 0.5
    assert steadied(0.5, 0.55, 0.53, 0.02) == pytest.approx(0.53)
    assert steadied(0.5, 0.55, 0.45, 0.02) == 0.5
    assert steadied(0.5, 0.7, 0.5, 0.02) == 0.7
    assert steadied(0.5, 0.0, 0.5, 0.02) == 0.0
    assert steadied(0.5, 0.2, 0.5, 0.02) == 0.2


def test_a_small_start_must_be_wanted_twice_and_a_large_one_happens_at_once():
    assert steadied(0.0, 0.2, 0.0, 0.02) == 0.0
    assert steadied(0.0, 0.2, 0.15, 0.02) == 0.15
    assert steadied(0.0, 0.5, 0.0, 0.02) == 0.5
