"""How global batches are divided: the shortest there is, of equal samples; nearly, of different ones."""

import itertools
import math
import random

import numpy as np
import pytest

from zeroresize.policy.data.division import Division


def division(fixed_s, pace_s, most=None, least=1, squares=0.0):
    return Division(tuple(fixed_s), tuple(pace_s), squares, tuple(most or [math.inf] * len(pace_s)), least)


def shortest_s(total, fixed_s, pace_s, most, least):
    """By trying all."""
    allowed = [range(least, min(int(limit), total) + 1) for limit in most]
    counts = (each for each in itertools.product(*allowed) if sum(each) == total)
    return min(max(f + p * n for f, p, n in zip(fixed_s, pace_s, each, strict=True)) for each in counts)


@pytest.mark.parametrize("seed", range(40))
def test_equal_samples_are_divided_so_that_the_longest_time_is_the_shortest_there_is(seed):
    chance = random.Random(seed)
    num_ranks, least = chance.randint(2, 3), chance.randint(1, 2)
    total = chance.randint(num_ranks * least, 14)
    fixed_s = [chance.choice([0.0, chance.random()]) for _ in range(num_ranks)]
    pace_s = [chance.choice([1.0, 0.1 + chance.random(), 4.0]) for _ in range(num_ranks)]
    most = [chance.choice([total, max(total // 2, least)]) for _ in range(num_ranks - 1)] + [total]
    counts = division(fixed_s, pace_s, [float(each) for each in most], least).counts(total)
    assert sum(counts) == total
    assert all(least <= count <= limit for count, limit in zip(counts, most, strict=True))
    longest_s = max(f + p * n for f, p, n in zip(fixed_s, pace_s, counts, strict=True))
    assert longest_s == pytest.approx(shortest_s(total, fixed_s, pace_s, most, least), rel=1e-9)


@pytest.mark.parametrize("counts", [(10, 6), (16, 0), (1, 1), (3, 0, 13), (7, 7, 7, 7)])
def test_counts_that_are_given_are_kept_and_a_smaller_batch_is_divided_alike(counts):
    fixed = Division.of_counts(counts)
    assert fixed.counts(sum(counts)) == counts
    for total in range(1, sum(counts)):
        part = fixed.counts(total)
        assert sum(part) == total
        assert all(0 <= few <= many for few, many in zip(part, counts, strict=True))


def test_a_batch_with_fewer_samples_than_ranks_goes_to_the_fastest():
    assert division([0.0] * 4, [4.0, 1.0, 2.0, 3.0]).counts(2) == (0, 1, 1, 0)
    assert division([0.0] * 2, [2.0, 1.0], least=3).counts(4) == (0, 4)
    assert division([0.0] * 2, [2.0, 1.0], least=3).counts(2) == (0, 2)


def test_more_samples_than_ranks_may_have_are_an_error():
    with pytest.raises(ValueError, match="9 samples are more than the ranks may have"):
        division([0.0] * 2, [1.0, 1.0], most=[4.0, 4.0]).counts(9)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_samples_of_different_lengths_are_each_given_to_one_rank_and_all_take_nearly_as_long(num_ranks, seed):
    rng = np.random.default_rng(seed)
    lengths_B = np.ceil(np.exp(rng.normal(4.5, 1.0, size=16 * num_ranks)))
    pace_s = [1.0, 2.0, 1.0, 1.5, 1.0, 4.0, 1.0, 1.0][:num_ranks]
    fixed_s = [float(rng.random()) for _ in range(num_ranks)]
    divided = division(fixed_s, pace_s, squares=1e-3)
    parts = divided.parts(lengths_B)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths_B)))
    work_B = divided.work(lengths_B)
    work_B /= work_B.mean()
    seconds = [f + p * work_B[part].sum() for f, p, part in zip(fixed_s, pace_s, parts, strict=True)]
    # No division, not even of parts of samples, has a shorter longest time than this.
    bound_s = (work_B.sum() + sum(f / p for f, p in zip(fixed_s, pace_s, strict=True))) / sum(1.0 / p for p in pace_s)
    bound_s = max(bound_s, min(pace_s) * work_B.max())
    assert max(seconds) <= 1.05 * bound_s


def test_seconds_without_samples_are_those_of_as_many_samples_whatever_lengths_are_counted_in():
    divided = division([20.0, 40.0], [1.0, 2.0], squares=1e-3)
    assert divided.counts(128) == (92, 36)
    for length in (1.0, 500.0):
        for lengths_B in (np.full(128, length), length * (1.0 + np.arange(128) % 3 / 100.0)):
            assert [len(part) for part in divided.parts(lengths_B)] == pytest.approx([92, 36], abs=1)


@pytest.mark.parametrize("seed", range(10))
def test_few_samples_of_different_lengths_are_divided_nearly_as_well_as_can_be(seed):
    rng = np.random.default_rng(seed)
    lengths_B, pace_s = rng.integers(1, 100, size=7).astype(float), (1.0, 2.0)
    parts = division([0.0, 0.0], pace_s).parts(lengths_B)
    longest = max(pace * lengths_B[part].sum() for pace, part in zip(pace_s, parts, strict=True))
    masks = itertools.product((0, 1), repeat=7)
    best = min(
        max(pace_s[0] * lengths_B[~np.array(mask, bool)].sum(), pace_s[1] * lengths_B[np.array(mask, bool)].sum())
        for mask in masks
        if 0 < sum(mask) < 7
    )
    assert longest <= 1.15 * best


def test_limits_and_the_least_number_hold_for_different_lengths_too():
    lengths_B = np.array([100.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    few = division([0.0, 0.0], [1.0, 1.0], most=[3.0, 6.0]).parts(lengths_B)
    assert len(few[0]) <= 3 and len(few[0]) + len(few[1]) == 6
    slow = division([0.0, 0.0], [1.0, 1e6], least=2).parts(lengths_B)
    assert [len(part) for part in slow] == [4, 2]
    alone = division([0.0, 0.0], [1.0, math.inf]).parts(lengths_B)
    assert [len(part) for part in alone] == [6, 0]
