"""When a rank is told to be slow, slower, and well again: plain numbers, with noise that a seed draws."""

import math

import numpy as np
import pytest

from zeroresize.policy.slowness.rank_level import RankLevel


def changes_of(levels, tolerance=0.03):
    """(window, change) of every change, windows from 1 on."""
    rank = RankLevel(tolerance)
    seen = [(number, rank.update(level)) for number, level in enumerate(levels, 1)]
    return [(number, change) for number, change in seen if change is not None], rank


def noisy(levels, deviation, seed=0):
    noise = np.random.default_rng(seed).normal(0.0, deviation, len(levels))
    return [math.log(level) + error for level, error in zip(levels, noise, strict=True)]


@pytest.mark.parametrize("times", [1.05, 1.1, 1.5, 4.0])
def test_slowness_is_told_when_it_begins_and_when_it_ends(times):
    changes, _ = changes_of(noisy([1.0] * 40 + [times] * 30 + [1.0] * 30, 0.005))
    assert [change.kind for _, change in changes] == ["begins", "ends"]
    (begun, begins), (ended, ends) = changes
    assert 42 <= begun <= 48
    assert begins.after == pytest.approx(times, rel=0.02)
    assert begun - begins.num_windows == 40
    assert 72 <= ended <= 78
    assert ends.before == pytest.approx(times, rel=0.02)
    assert ends.after == 1.0


def test_what_lasts_for_one_window_is_not_told():
    changes, _ = changes_of(noisy([1.0] * 40 + [3.0] + [1.0] * 5 + [3.0] + [1.0] * 20, 0.005))
    assert changes == []


def test_a_rank_that_is_slow_from_the_start_is_told():
    (change,), rank = changes_of(noisy([2.0] * 40, 0.01))
    assert change[1].kind == "begins"
    assert change[1].num_windows == change[0]
    assert rank.times == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("deviation", [0.002, 0.01, 0.05, 0.1])
def test_noise_alone_tells_nothing(deviation):
    num_told = sum(len(changes_of(noisy([1.0] * 500, deviation, seed))[0]) for seed in range(20))
    assert num_told == 0


@pytest.mark.parametrize("tolerance", [0.03, 0.1])
def test_what_is_told_to_begin_exceeds_the_tolerance_also_where_it_comes_and_goes(tolerance):
    num_begun = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        slow = 0.25 * (random.random(60) < 0.7) + random.normal(0.0, 0.05, 60)
        for _, change in changes_of([*random.normal(0.0, 0.05, 20), *slow], tolerance)[0]:
            if change.kind == "begins":
                num_begun += 1
                assert change.after > 1.0 + tolerance
    assert num_begun > 100


def test_a_rank_slower_by_less_than_the_tolerance_is_not_told():
    assert changes_of(noisy([1.02] * 300, 0.003))[0] == []
    assert len(changes_of(noisy([1.02] * 300, 0.003), tolerance=0.01)[0]) == 1


def test_another_level_is_told_once_and_a_slowness_that_stays_is_not_told_again():
    changes, _ = changes_of(noisy([1.0] * 30 + [1.5] * 40 + [2.5] * 40 + [1.2] * 40, 0.01))
    assert [change.kind for _, change in changes] == ["begins", "changes", "changes"]
    assert [change.after for _, change in changes] == pytest.approx([1.5, 2.5, 1.2], rel=0.03)
    assert changes[1][1].before == pytest.approx(1.5, rel=0.03)


def test_slowness_of_five_percent_is_held_through_noise():
    """Hysteresis: one that is near what is told at all begins once, and ends once."""
    seen = [changes_of(noisy([1.0] * 40 + [1.05] * 200 + [1.0] * 60, 0.01, seed))[0] for seed in range(20)]
    kinds = [[change.kind for _, change in changes] for changes in seen]
    assert kinds.count(["begins", "ends"]) >= 19


def test_slowness_that_is_soon_over_each_time_is_told_more_and_more_rarely():
    changes, _ = changes_of(noisy([1.0] * 30 + ([1.5] * 3 + [1.0] * 6) * 40, 0.01))
    assert 1 <= [change.kind for _, change in changes].count("begins") <= 10  # of 40
    long_after, _ = changes_of(noisy([1.0] * 30 + ([1.5] * 3 + [1.0] * 6) * 4 + [1.0] * 200 + [1.5] * 3, 0.01))
    assert [change.kind for _, change in long_after][-1] == "begins"


def test_a_slowness_that_begins_is_no_noise():
    """One of two and a half times the noise of a window is told within 16 windows, which must not count as noise."""
    begun = [changes_of(noisy([1.0] * 60 + [1.05] * 18, 0.02, seed))[0] for seed in range(40)]
    assert sum(bool(changes) for changes in begun) >= 36


def test_what_was_slow_before_is_no_noise_later():
    changes, _ = changes_of(noisy([1.0] * 40 + [4.0] * 20 + [1.0] * 40 + [1.05] * 10, 0.005))
    assert [change.kind for _, change in changes] == ["begins", "ends", "begins"]


def test_noise_of_several_windows_in_a_row_must_be_exceeded_too():
    """Of noise with a correlation of 0.8 from window to window little is told, in 10,000 windows."""
    num_told = 0
    for seed in range(20):
        drawn = np.random.default_rng(seed).normal(0.0, 0.02 * math.sqrt(1.0 - 0.8**2), 500)
        levels = [0.0]
        for number in drawn:
            levels.append(0.8 * levels[-1] + number)
        num_told += sum(change.kind == "begins" for _, change in changes_of(levels)[0])
    assert num_told <= 4


@pytest.mark.parametrize("begins", [2, 5, 9, 12, 20, 30])
def test_large_slowness_that_begins_early_is_told_in_two_windows(begins):
    changes, _ = changes_of(noisy([1.0] * begins + [10.0] * 3, 0.01))
    assert [(number, change.kind) for number, change in changes] == [(begins + 2, "begins")]


def test_spells_in_a_row_leave_what_is_known_of_noise():
    changes, _ = changes_of(noisy([1.0] * 40 + ([3.0] * 12 + [1.0] * 8) * 20 + [1.0] * 4 + [1.05] * 10, 0.005))
    assert [change.kind for _, change in changes] == ["begins", "ends"] * 20 + ["begins"]
