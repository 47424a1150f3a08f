"""How fast ranks are follows jumps and no single interruption; it is worked out anew as often as that may cost."""

import itertools

import pytest
from helpers.states import resumed

from zeroresize.policy.pipeline.profile_cadence import MAX_MEASURING, MOST_BLOCKS
from zeroresize.policy.strategy.stragglers.rank_speeds import LEAST_STEPS, RankSpeeds, SampleCadence


def test_speeds_follow_jumps_after_three_steps_and_no_single_interruption():
    speeds, even = RankSpeeds(3), (1.0,) * 3
    for _ in range(4):
        speeds.learn((2.0, 2.02, 1.99), even, even)
    assert len(set(speeds.speeds())) == 1
    speeds.learn((2.0, 9.0, 2.0), even, even)
    assert len(set(speeds.speeds())) == 1
    speeds.learn((2.0, 2.0, 2.0), even, even)
    for _ in range(2):
        speeds.learn((2.0, 8.0, 2.0), even, even)
    first, slow, _ = speeds.speeds()
    assert first / slow == pytest.approx(4.0, rel=0.05)


def test_a_rank_without_a_part_is_as_fast_as_its_products_say():
    speeds = RankSpeeds(3)
    speeds.learn((48.0, 48.0, 48.0), (1.0,) * 3, (0.1, 0.1, 0.1))  # warming up
    for probe_s in (0.0, 0.0, 0.0, 0.1):
        speeds.learn((3.0, 3.0, 3.0), (1.0,) * 3, (probe_s,) * 3)
    part = (1.0, 1.0, 0.0)
    for probe_s in (0.2, 0.0, 0.2, 0.0, 0.0):  # steps without a probe say nothing
        speeds.learn((3.0, 3.0, 0.0), part, (0.0, 0.0, probe_s))
    assert speeds.speeds()[2] == pytest.approx(speeds.speeds()[0] / 2)
    speeds.learn((3.0, 3.0, 0.0), part, (0.0, 0.0, 0.1))  # one lucky probe
    assert speeds.speeds()[2] == pytest.approx(speeds.speeds()[0] / 2)
    loaded = resumed(speeds)
    for either in (speeds, loaded):
        either.learn((3.0, 3.0, 0.0), part, (0.0, 0.0, 0.1))
    assert loaded.speeds() == speeds.speeds()


def steps_of_samples(cadence, num_steps, working_s, step_s=1.0, extra=None):
    """After which steps there is a new sample, where each takes so long; ``extra`` seconds in steps without one."""
    samples = []
    for step in range(num_steps):
        is_due = cadence.is_due()
        if is_due:
            samples.append(step)
        cadence.learn(working_s if is_due else (extra or {}).get(step, 0.0), step_s)
    return samples


def test_the_first_steps_each_make_a_sample_and_then_one_in_so_many_does():
    samples = steps_of_samples(SampleCadence(4), 100, working_s=0.0)
    assert samples == [0, 1, 2, 3, *range(3 + LEAST_STEPS, 100, LEAST_STEPS)]


@pytest.mark.parametrize("working_s", [0.1, 0.4, 2.0, 5.0])
def test_dear_samples_are_so_rare_that_they_take_their_share_of_steps_and_no_more(working_s):
    cadence, num_steps = SampleCadence(4), 20_000
    steps_of_samples(cadence, 2_500, working_s)
    share = working_s * len(steps_of_samples(cadence, num_steps, working_s)) / num_steps
    assert 0.5 * min(MAX_MEASURING, working_s / LEAST_STEPS) < share <= MAX_MEASURING * 1.05


def test_what_changed_speeds_cost_delays_the_next_sample_and_an_idle_time_gives_no_credit():
    assert steps_of_samples(SampleCadence(1), 60, 0.0, extra={10: 0.295})[1] == 40  # paid by 30 steps
    cadence = SampleCadence(1)
    steps_of_samples(cadence, 900, 0.0)
    later = steps_of_samples(cadence, 300, 0.5)
    assert all(after - before >= 0.5 / MAX_MEASURING for before, after in itertools.pairwise(later))


def test_there_is_a_sample_now_and_then_whatever_it_costs_and_after_a_change_at_once():
    cadence = SampleCadence(1)
    assert steps_of_samples(cadence, 3 * MOST_BLOCKS, 1e6) == [0, MOST_BLOCKS, 2 * MOST_BLOCKS]
    cadence.begin_anew()
    assert steps_of_samples(cadence, 10, 1e6) == [0]
