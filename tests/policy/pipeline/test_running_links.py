"""What links take by now: the newest figures where they stay, their mean where they vary from step to step."""

import math

import numpy as np
import pytest

from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.running_links import RunningLinks

NUM_BYTES = 1e6


def of_links(seconds):
    """Links on which a message of NUM_BYTES takes so long, half of it by its bytes."""
    return tuple(MoveCost(total / 2 / NUM_BYTES, total / 2) for total in seconds)


def seconds_of(links):
    return np.array([link.seconds(NUM_BYTES) for link in links])


def test_links_that_never_change_are_as_measured():
    running = RunningLinks(NUM_BYTES)
    for _ in range(100):
        links = running.after(of_links([1.0, 4.0]))
    assert [figure for link in links for figure in (link.seconds_per_byte, link.fixed_s)] == pytest.approx(
        [0.5e-6, 0.5, 2e-6, 2.0], rel=1e-12
    )


def test_a_link_that_has_become_slow_and_stays_so_is_known_after_two_measurements():
    running = RunningLinks(NUM_BYTES)
    for _ in range(40):
        running.after(of_links([1.0, 1.0, 1.0]))
    for _ in range(2):
        links = running.after(of_links([1.0, 4.0, 1.0]))
    assert seconds_of(links) == pytest.approx([1.0, 4.0, 1.0], rel=1e-9)


def test_of_links_that_vary_from_one_measurement_to_the_next_the_mean_is_known():
    """The mean of 16 varies by a quarter of what single ones do: nothing in force later could follow those."""
    random = np.random.default_rng(0)
    running = RunningLinks(NUM_BYTES)
    measured = np.clip(random.normal(2.5, 0.5, (400, 7)), 1.0, 4.0)
    known = np.array([seconds_of(running.after(of_links(row))) for row in measured])
    assert known[200:].std() < measured[200:].std() / 3
    assert known[200:].mean() == pytest.approx(2.5, abs=0.1)


def test_a_pipeline_of_a_single_stage_has_no_links():
    assert RunningLinks(NUM_BYTES).after(()) == ()


def test_links_of_another_pipeline_are_an_error():
    running = RunningLinks(NUM_BYTES)
    running.after(of_links([1.0, 1.0]))
    with pytest.raises(ValueError, match="3 links are not those of before, which were 2"):
        running.after(of_links([1.0, 1.0, 1.0]))


@pytest.mark.parametrize("num_bytes", [-1.0, math.nan, math.inf])
def test_bytes_that_no_message_has_are_an_error(num_bytes):
    with pytest.raises(ValueError, match="num_bytes="):
        RunningLinks(num_bytes)
