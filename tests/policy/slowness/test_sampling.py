"""Which steps a watch listens to: as many as its cost allows, without a rhythm, in the same windows on all ranks."""

import itertools
import math
from collections import Counter

import pytest

from zeroresize.policy.slowness.windows import _LAG, _MOST_STRIDE, _SHARE, Sampling

STEPS_OF_WINDOW = 10


def listened(sampling, steps, numbers=(0.0003, 0.02)):
    """Which of these steps are listened to, while the numbers of each window come as soon as it is over."""
    heard = []
    for step in steps:
        if sampling.listens_to(step):
            heard.append(step)
        while sampling.ends_window(step):
            sampling.take(*numbers)
    return heard


def settled_stride(*numbers):
    """One of how many steps is listened to in the end."""
    num_steps = 100 * STEPS_OF_WINDOW * _MOST_STRIDE
    late = [
        step for step in listened(Sampling(STEPS_OF_WINDOW), range(1, num_steps + 1), numbers) if step > num_steps / 2
    ]
    return num_steps / 2 / len(late)


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.05, 0.1])
def test_what_listening_costs_is_no_more_than_its_share_of_the_time(step_s):
    cost_s = 0.0003
    stride = round(settled_stride(cost_s, step_s))
    assert cost_s <= _SHARE * stride * step_s < cost_s + _SHARE * step_s


def test_of_long_steps_none_is_left_out():
    assert settled_stride(0.0003, 0.2) == pytest.approx(1.0, rel=0.02)


def test_however_costly_it_is_some_steps_are_listened_to():
    assert settled_stride(1.0, 0.02) == pytest.approx(_MOST_STRIDE, rel=0.05)


@pytest.mark.parametrize("hiccup", [(5.0, 0.02), (math.nan, 0.02), (0.0003, math.nan), (0.0003, 0.0)])
def test_a_hiccup_in_a_window_and_a_window_without_times_change_nothing(hiccup):
    plain, disturbed = Sampling(STEPS_OF_WINDOW), Sampling(STEPS_OF_WINDOW)
    steps = range(1, 801)
    listened(plain, steps), listened(disturbed, steps)
    plain.take(0.0003, 0.02), disturbed.take(*hiccup)
    further = range(801, 4000)
    assert listened(plain, further) == listened(disturbed, further)


@pytest.mark.parametrize("delay", [1, 35, 200, 1000])
def test_windows_end_at_the_same_steps_for_a_rank_to_which_the_numbers_come_late(delay):
    ends = {0: [], delay: []}
    heard = {0: [], delay: []}
    for late in ends:
        sampling, under_way = Sampling(STEPS_OF_WINDOW), []
        for step in range(1, 3001):
            while under_way and under_way[0] + late < step:
                under_way.pop(0)
                sampling.take(0.0003, 0.02)
            if sampling.listens_to(step):
                heard[late].append(step)
            while sampling.ends_window(step):
                ends[late].append(sampling._begin - 1)
                under_way.append(step)
    assert ends[delay] == ends[0][: len(ends[delay])] and len(ends[delay]) > _LAG
    assert len(heard[delay]) >= len(heard[0]) and max(b - a for a, b in itertools.pairwise(heard[delay])) < 2 * 8


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 10, 16, 32])
def test_of_each_stretch_it_listens_to_one_step_and_what_recurs_is_no_usual_step(stride):
    """Of a window the lower quartile counts, so at most seven of ten steps may be those that a rank logs, say."""
    sampling = Sampling(STEPS_OF_WINDOW)
    heard = listened(sampling, range(1, 900 * stride + 2000), (_SHARE * stride * 0.99, 1.0))
    heard = [step for step in heard if step >= heard[STEPS_OF_WINDOW * (_LAG + 1)]][:400]
    for period in range(2, 31):
        for begin in range(390):
            assert max(Counter(step % period for step in heard[begin : begin + 10]).values()) <= 6
