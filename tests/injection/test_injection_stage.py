"""A slow stage of a pipeline: its layers take χ times as long, those that arrive too, and nothing else does."""

import time

import pytest
import torch
from torch import nn

from zeroresize.injection import StragglerInjector, round_robin
from zeroresize.injection.delay import HostDelay
from zeroresize.injection.slow_stage import SlowStage
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


def test_layers_of_a_slow_stage_take_chi_times_as_long_those_that_arrive_too(run_ranks, monkeypatch):
    def check(rank, group):
        clock = Clock(monkeypatch)

        def loss(outputs, target):
            return nn.functional.mse_loss(_Working.apply(outputs, pipeline.layers[0]), target)

        pipeline = pipeline_of(group, clock.passes, loss)
        slow = SlowStage(pipeline, HostDelay(clock=lambda: clock.now, sleep=clock.passes))
        x, profiles = torch.ones(4, 4), []
        pipeline.step(x, target=x)
        with slow:
            slow.chi = 3.0 if rank == 1 else 1.0
            for boundaries in ((0, 2, 4), (0, 1, 4), (0, 3, 4)):
                move_layers(pipeline, boundaries, optimizer=None)
                with LayerProfiler(pipeline) as profiler:
                    pipeline.step(x, target=x)
                profiles.append(profiler.gather())
        with LayerProfiler(pipeline) as profiler:
            pipeline.step(x, target=x)
        assert not pipeline.module.watchers.everyone
        return profiles, profiler.gather(), slow.num_products

    (slowed, free, none_slowed), (_, _, num_slowed) = run_ranks(check, 2)
    for profile in slowed:
        first_slow = profile.boundaries[1]
        chi = [3.0 if number >= first_slow else 1.0 for number in range(4)]
        assert [one.forward_s for one in profile.layers] == [MICRO * one for one in chi]
        assert [one.backward_s for one in profile.layers] == [2.0 * MICRO * one for one in chi]
        assert profile.loss_s == 3.0 * MICRO * 3.0
    assert [one.forward_s + one.backward_s for one in free.layers] == [3.0 * MICRO] * 4
    # Two, three and one layers, each time with the loss, forward and backward.
    assert none_slowed == 0 and num_slowed == 2 * MICRO * (3 + 4 + 2)


def test_an_injector_slows_stages_by_chi_or_schedule(run_ranks):
    def check(rank, group):
        pipeline = pipeline_of(group, lambda work: time.sleep(work * 0.002))
        x = torch.ones(4, 4)
        pipeline.step(x, target=x)
        injector = StragglerInjector(pipeline, process_group=group, schedule=round_robin(chi=4.0))
        added_s = []
        with injector:
            for epoch in range(2):
                injector.set_epoch(epoch)
                before = injector.seconds_added
                pipeline.step(x, target=x)
                added_s.append(injector.seconds_added - before)
        pipeline.step(x, target=x)
        assert injector.seconds_added == pytest.approx(sum(added_s))
        with pytest.raises(ValueError, match="rank 2"):
            StragglerInjector(pipeline, process_group=group, chi={2: 2.0})
        return added_s

    (slow, fast), (_, _) = by_rank = run_ranks(check, 2)
    layers_s = 2 * MICRO * 3 * 0.002
    assert slow >= 0.9 * 3.0 * layers_s and fast == 0.0
    assert by_rank[1][0] == 0.0 and by_rank[1][1] >= 0.9 * 3.0 * layers_s
