"""Which steps a watch listens to: as many as its cost allows, without a rhythm, alike wherever the same is known."""

from collections import Counter

import pytest

from zeroresize.policy.slowness.windows import _LAG, _LONGEST_S, _SHARE, Sampling


def settled(cost_s, step_s, steps_of_window=10):
    sampling = Sampling(steps_of_window)
    for _ in range(3 * _LAG):
        sampling.take(cost_s, step_s)
        sampling.end_window()
    return sampling


@pytest.mark.parametrize("step_s", [0.002, 0.02, 0.05, 0.1])
def test_what_listening_costs_is_no_more_than_its_share_of_the_time(step_s):
    cost_s = 0.0003
    stride = settled(cost_s, step_s).strides[0]
    assert cost_s <= _SHARE * stride * step_s < cost_s + _SHARE * step_s


def test_of_long_steps_none_is_left_out():
    assert settled(0.0003, 0.2).strides[0] == 1
    assert settled(0.5, 10.0).strides[0] == 1  # whatever it costs, as a window lasts for more than a minute


def test_however_costly_it_is_a_window_lasts_no_longer_than_a_minute():
    sampling = settled(1e3, 0.02)
    assert sampling.strides[0] * 10 * 0.02 == pytest.approx(_LONGEST_S, rel=0.01)


def test_a_hiccup_in_a_window_changes_nothing():
    sampling = settled(0.0003, 0.02)
    stride = sampling.strides[0]
    for cost_s in (0.0003, 5.0, 0.0003, 0.0003, *[0.0003] * _LAG):
        sampling.take(cost_s, 0.02)
        sampling.end_window()
        assert sampling.strides[0] == stride


@pytest.mark.parametrize("numbers", [(float("nan"), 0.02), (0.0003, float("nan")), (0.0003, 0.0)])
def test_a_window_without_times_is_no_error(numbers):
    assert settled(*numbers).strides[0] >= 1


def test_it_begins_with_all_steps_and_listens_to_none_while_the_numbers_that_decide_have_not_come():
    sampling = Sampling(10)
    for _ in range(_LAG):
        assert sampling.strides[0] == 1 and sampling.listens_to(7) and sampling.listens_to(8)
        sampling.end_window()
    assert not any(sampling.listens_to(step) for step in range(1, 100))
    sampling.take(0.0003, 0.02)
    assert sampling.strides[0] == 1


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 10, 16, 50])
def test_of_each_stretch_it_listens_to_one_step_and_what_recurs_is_no_usual_step(stride):
    """Of a window the lower quartile counts, so at most seven of ten steps may be those that a rank logs, say."""
    sampling = Sampling(10)
    sampling.strides[0] = stride
    listened = [step for step in range(1, 400 * stride + 1) if sampling.listens_to(step)]
    assert [(step - 1) // stride for step in listened] == list(range(400))
    for period in range(2, 31):
        for begin in range(390):
            assert max(Counter(step % period for step in listened[begin : begin + 10]).values()) <= 6
