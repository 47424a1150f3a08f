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
    assert steadied(0.5, 0.3, 0.5, 0.02) == 0.3


def test_a_small_start_must_be_wanted_twice_and_a_large_one_happens_at_once():
    assert steadied(0.0, 0.2, 0.0, 0.02) == 0.0
    assert steadied(0.0, 0.2, 0.15, 0.02) == 0.15
    assert steadied(0.0, 0.5, 0.0, 0.02) == 0.5


@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.29])
def test_a_fall_from_far_above_is_letting_go(wanted):
    """At γ = 0.8 a fifth of the products tells the speed: an error of 5 % there is a γ of 0.1 and more."""
    assert steadied(0.8, wanted, 0.8, 0.02) == 0.0


def test_a_fall_to_a_large_ratio_or_from_a_small_one_is_as_wanted():
    assert steadied(0.8, 0.35, 0.8, 0.02) == 0.35
    assert steadied(0.35, 0.15, 0.35, 0.02) == 0.15
