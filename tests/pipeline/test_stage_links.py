"""A balancer that measures links divides layers by what messages take, on real ranks."""

import math

import pytest
from helpers.sleeping_layers import MICRO, Training, batch

from zeroresize.pipeline import measuring
from zeroresize.policy.moves.move_cost import MoveCost


def slow_before_the_last(*_, **__):
    """A message between the last two stages takes as long as three and a half layers, as all ranks know."""
    return MoveCost(0.0, 0.0), MoveCost(0.0, 0.025)


def test_layers_leave_the_stages_beside_a_slow_link(run_ranks, monkeypatch):
    monkeypatch.setattr(measuring, "measure_neighbour_links", slow_before_the_last)

    def check(rank, group, measure_links):
        training = Training(group, 12, (0, 4, 8, 12), "1f1b", measure_links=measure_links)
        return training.train(30), training.losses

    (moved, losses), *_ = reversed(run_ranks(check, 3, True))
    (stayed, as_ever), *_ = reversed(run_ranks(check, 3, False))
    assert stayed == (0, 4, 8, 12)
    assert moved[1] > 4 and moved[2] > 8
    assert losses == pytest.approx(as_ever, rel=1e-12)


def test_all_ranks_know_what_messages_take(run_ranks):
    def check(rank, group):
        training = Training(group, 6, (0, 3, 6), "1f1b", measure_links=True)
        training.train(8)
        messages = training.balancer._rebalancing.rule.messages
        return messages.links, messages.num_bytes

    first, second = run_ranks(check, 2)
    assert first == second
    links, num_bytes = first
    assert len(links) == 1 and all(0.0 < link.seconds(1e6) < 10.0 for link in links)
    shape = batch(0)[0].shape
    assert num_bytes[3] == 8.0 * math.prod(shape) / MICRO  # of float64, both ways
