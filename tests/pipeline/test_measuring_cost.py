"""What measuring costs decides how often layers are measured, alike on all ranks."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.sleeping_layers import MICRO, batch, layers_of
from torch import nn

from zeroresize.pipeline import LayerProfiler, Pipeline, PipelineBalancer, measuring

pytestmark = pytest.mark.same_ranks

STEP_S = 1.0


class Clock:
    """The processor's time of this rank: a step takes a second, a profile as long as ``profile_s``."""

    def __init__(self, monkeypatch, profile_s):
        self.now_s, self.profile_s = 0.0, profile_s
        monkeypatch.setattr(measuring.time, "thread_time", lambda: self.now_s)
        enter = LayerProfiler.__enter__

        def entered(profiler):
            self.now_s += self.profile_s
            return enter(profiler)

        monkeypatch.setattr(LayerProfiler, "__enter__", entered)


def training(group, clock, **options):
    """A balancer, what it has recorded, and a function that trains so many steps."""
    records = []
    layers = layers_of(4)
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=group)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    balancer = PipelineBalancer(pipeline, optimizer, min_saving=0.99, on_profile=records.append, **options)

    def train(num_steps):
        for step in range(num_steps):
            x, target = batch(step)
            with balancer.step():
                pipeline.step(x, target=target)
                if clock is not None:
                    clock.now_s += STEP_S
        return balancer

    return balancer, records, train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile_s", "profile_every", "interval"),
    [(0.198, "auto", 40), (0.01, "auto", 10), (0.01, 25, 25), (0.198, 25, 40)],
)
@on_ranks(2)
def test_dear_profiles_become_rare_and_cheap_ones_come_as_often_as_allowed(
    rank, group, *, monkeypatch, profile_s, profile_every, interval
):
    """Cheap and dear on this clock; ranks differ, and agree on the mean."""

    clock = Clock(monkeypatch, profile_s * (0.5 + rank))
    balancer, records, train = training(group, clock, profile_every=profile_every)
    train(150)
    steps = [one.step for one in records]
    assert balancer._rebalancing.interval == interval
    first, second = gathered(
        group, (steps, [one.profile_every for one in records], [round(one.profile_cost, 9) for one in records[1:]])
    )
    assert first == second
    steps, intervals, costs = first
    assert intervals[-1] == interval and steps[-1] - steps[-2] == interval
    assert costs[-1] == pytest.approx(profile_s)


@on_ranks(2)
def test_what_must_be_measured_now_does_not_wait_for_a_long_interval(rank, group, *, monkeypatch):
    balancer, records, train = training(group, Clock(monkeypatch, 0.198))
    train(60)
    num_records = len(records)
    balancer.profile_next()
    train(2)
    assert len(records) - num_records == 1
