"""When a rank is told to be slow, slower, and well again: plain numbers, with noise that a seed draws."""

import math

import numpy as np
import pytest

from zeroresize.policy.slowness.rank_level import RankLevel


def changes_of(levels, tolerance=0.03):
    """(window, change) of every change, windows from 1 on."""
    rank = RankLevel(tolerance)
    seen = [(number, rank.update(level)) for number, level in enumerate(levels, 1)]
    return [(number, change) for number, change in seen if change is not None]


def kinds_of(levels):
    return [change.kind for _, change in changes_of(levels)]


def noisy(levels, deviation, seed=0):
    noise = np.random.default_rng(seed).normal(0.0, deviation, len(levels))
    return [math.log(level) + error for level, error in zip(levels, noise, strict=True)]


@pytest.mark.parametrize("times", [1.05, 1.1, 1.5, 4.0])
def test_slowness_is_told_when_it_begins_and_when_it_ends(times):
    (begun, begins), (ended, ends) = changes_of(noisy([1.0] * 40 + [times] * 30 + [1.0] * 30, 0.005))
    assert (begins.kind, ends.kind) == ("begins", "ends")
    assert 42 <= begun <= 48 and begun - begins.num_windows == 40
    assert begins.after == pytest.approx(times, rel=0.02)
    assert 72 <= ended <= 78
    assert (ends.before, ends.after) == (pytest.approx(times, rel=0.02), 1.0)


def test_what_lasts_for_one_window_is_not_told():
    assert changes_of(noisy([1.0] * 40 + [3.0] + [1.0] * 5 + [3.0] + [1.0] * 20, 0.005)) == []


@pytest.mark.parametrize("begins", [0, 2, 5, 9, 12, 20, 30])
def test_large_slowness_is_told_in_two_windows_however_early_it_begins(begins):
    changes = changes_of(noisy([1.0] * begins + [10.0] * 3, 0.01))
    assert [(number, change.kind, change.num_windows) for number, change in changes] == [(begins + 2, "begins", 2)]


@pytest.mark.parametrize("deviation", [0.002, 0.01, 0.05, 0.1])
def test_noise_alone_tells_nothing(deviation):
    assert sum(len(changes_of(noisy([1.0] * 500, deviation, seed))) for seed in range(20)) == 0


def test_a_rank_slower_by_less_than_the_tolerance_is_not_told():
    assert changes_of(noisy([1.02] * 300, 0.003)) == []
    assert len(changes_of(noisy([1.02] * 300, 0.003), tolerance=0.01)) == 1


def test_another_level_is_told_once_and_a_slowness_that_stays_is_not_told_again():
    changes = [change for _, change in changes_of(noisy([1.0] * 30 + [1.5] * 40 + [2.5] * 40 + [1.2] * 40, 0.01))]
    assert [change.kind for change in changes] == ["begins", "changes", "changes"]
    assert [change.after for change in changes] == pytest.approx([1.5, 2.5, 1.2], rel=0.03)
    assert changes[1].before == pytest.approx(1.5, rel=0.03)


def test_slowness_of_five_percent_begins_once_and_ends_once():
    """It is near what is told at all, and held through noise."""
    kinds = [kinds_of(noisy([1.0] * 40 + [1.05] * 200 + [1.0] * 60, 0.01, seed)) for seed in range(20)]
    assert kinds.count(["begins", "ends"]) >= 19


def test_slowness_that_is_soon_over_each_time_is_told_more_and_more_rarely():
    short = [1.5] * 3 + [1.0] * 6
    assert 1 <= kinds_of(noisy([1.0] * 30 + short * 40, 0.01)).count("begins") <= 10  # of 40
    assert kinds_of(noisy([1.0] * 30 + short * 4 + [1.0] * 200 + [1.5] * 3, 0.01))[-1] == "begins"
