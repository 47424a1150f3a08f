"""A slow stage of a pipeline: its layers take χ times as long, those that arrive too, and nothing else does."""

from functools import partial

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn

from zeroresize.injection import StragglerInjector, delay, round_robin
from zeroresize.injection.delay import CpuDelay
from zeroresize.pipeline import LayerProfiler, Pipeline, measuring, move_layers

MICRO = 2


class _Working(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.work_for(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.layer.work_for(2.0)
        return dy.clone(), None


class Working(nn.Module):
    def __init__(self, work_for):
        super().__init__()
        self.linear, self.work_for = nn.Linear(4, 4), work_for

    def forward(self, x):
        return _Working.apply(self.linear(x), self)


class Clock:
    """Seconds pass only where somebody works or sleeps."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)

    def passes(self, seconds):
        self.now += seconds


def pipeline_of(group, work_for, loss=nn.functional.mse_loss):
    layers = [Working(work_for) for _ in range(4)]
    return Pipeline(layers, loss, num_microbatches=MICRO, process_group=group)


@on_ranks(2)
def test_layers_of_a_slow_stage_take_chi_times_as_long_those_that_arrive_too(rank, group, *, monkeypatch):
    clock = Clock(monkeypatch)
    host = partial(CpuDelay, clock=lambda: clock.now, sleep=clock.passes)
    monkeypatch.setattr(delay, "CpuDelay", host)

    def loss(outputs, target):
        return nn.functional.mse_loss(_Working.apply(outputs, pipeline.layers[0]), target)

    pipeline = pipeline_of(group, clock.passes, loss)
    injector = StragglerInjector(pipeline, process_group=group, schedule=round_robin(chi=3.0))
    x = torch.ones(4, 4)
    pipeline.step(x, target=x)

    def profile_of_step():
        with LayerProfiler(pipeline) as profiler:
            pipeline.step(x, target=x)
        return profiler.gather()

    profiles = []
    with injector:
        injector.set_epoch(1)
        for boundaries in ((0, 2, 4), (0, 1, 4), (0, 3, 4)):
            move_layers(pipeline, boundaries, optimizer=None)
            profiles.append(profile_of_step())
        num_slowed, added_s = injector.num_products, injector.seconds_added
        injector.set_epoch(0)
        first_slow = profile_of_step()
    free = profile_of_step()
    assert not pipeline.module.watchers.everyone
    with pytest.raises(ValueError, match="rank 2"):
        StragglerInjector(pipeline, process_group=group, chi={2: 2.0})
    (slowed, other, free, none_slowed, _), (_, _, _, num_slowed, added_s) = gathered(
        group, (profiles, first_slow, free, num_slowed, added_s)
    )
    for profile in slowed:
        chi = [3.0 if number >= profile.boundaries[1] else 1.0 for number in range(4)]
        assert [one.forward_s for one in profile.layers] == [MICRO * one for one in chi]
        assert [one.backward_s for one in profile.layers] == [2.0 * MICRO * one for one in chi]
        assert profile.loss_s == 3.0 * MICRO * 3.0
    assert [one.forward_s for one in other.layers] == [3.0 * MICRO] * 3 + [MICRO]
    assert [one.forward_s + one.backward_s for one in free.layers] == [3.0 * MICRO] * 4
    # Two, three and one layers, each time with the loss, forward and backward: each takes three seconds in all.
    assert none_slowed == 0 and num_slowed == 2 * MICRO * (3 + 4 + 2)
    assert added_s == 2.0 * 3.0 * MICRO * (3 + 4 + 2)
