"""Seconds and bytes of layers: in virtual time, and counted by hand."""

import pytest
import torch
from helpers import pipelines
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import batch, pipeline_of
from helpers.processes import for_each
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroresize.pipeline import LayerProfiler, measuring, move_layers

pytestmark = pytest.mark.same_ranks


class Clock:
    """Seconds that pass only where a layer says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)


class _Passing(torch.autograd.Function):
    """y = x; seconds pass in forward and in backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.clock.now += ctx.backward_s
        return dy.clone(), None, None, None


class Working(nn.Module):
    """Takes ``work`` seconds forward and twice that backward, half of it on either side of its weight's product."""

    def __init__(self, clock, work, recomputes=False):
        super().__init__()
        self.clock, self.work, self.recomputes = clock, work, recomputes
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)

    def run(self, x):
        x = _Passing.apply(x, self.clock, self.work / 2, self.work)
        return _Passing.apply(torch.relu(self.inner(x)), self.clock, self.work / 2, self.work)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks(2)
def test_a_layer_with_k_times_the_work_takes_k_times_the_seconds(rank, group, *, monkeypatch, schedule):
    works = [1.0, 3.0, 2.0, 5.0, 4.0]

    clock = Clock(monkeypatch)
    layers = [Working(clock, work) for work in works]

    def loss(outputs, target):  # belongs to no layer
        if type(outputs) is torch.Tensor:  # not where it is asked what counts
            outputs = _Passing.apply(outputs, clock, 100.0, 100.0)
        return nn.functional.mse_loss(outputs, target)

    pipeline = pipeline_of(group, (0, 2, 5), layers=layers, loss=loss, schedule=schedule)
    x, profiles = torch.ones(8, 4), []
    for boundaries in ((0, 4, 5), (0, 1, 5), (0, 2, 5)):
        pipeline.step(x, target=x)
        move_layers(pipeline, boundaries, optimizer=None)
        with LayerProfiler(pipeline) as profiler:
            pipeline.step(x, target=x)
        profiles.append(profiler.gather())
        assert profiles[-1].boundaries == boundaries
    first, second = gathered(group, profiles)
    assert first == second
    for profile in first:
        assert [one.forward_s for one in profile.layers] == [pipelines.MICRO * work for work in works]
        # Nobody wants the gradient of the first layer's input, so half of its backward is left out.
        backward = [works[0], *(2 * work for work in works[1:])]
        assert [one.backward_s for one in profile.layers] == [pipelines.MICRO * one for one in backward]
        middle = profile.boundaries[1]
        of_stage = 3 * sum(works[:middle]) - works[0], 3 * sum(works[middle:]) + 200.0
        assert profile.stage_s == tuple(pipelines.MICRO * one for one in of_stage)


@on_ranks(2)
def test_frozen_layers_have_no_backward_and_recomputing_is_backward(rank, group, *, monkeypatch):
    clock = Clock(monkeypatch)
    layers = [Working(clock, 1.0), Working(clock, 2.0), Working(clock, 4.0, recomputes=True), nn.Identity()]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    pipeline = pipeline_of(group, (0, 3, 4), layers=layers, loss=nn.functional.mse_loss)
    x = torch.ones(8, 4)
    pipeline.step(x, target=x)
    with LayerProfiler(pipeline) as profiler:
        pipeline.step(x, target=x)
    profile, _ = gathered(group, profiler.gather())
    assert [one.forward_s for one in profile.layers] == [4.0, 8.0, 16.0, 0.0]
    # Only what leads to a weight that learns: the layer's second half, and the forward up to it once more.
    assert [one.backward_s for one in profile.layers] == [0.0, 0.0, 4 * (4.0 + 2.0), 0.0]


@on_ranks(2)
def test_bytes_are_those_counted_by_hand(rank, group):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 8, dtype=torch.float64)
            self.register_buffer("table", torch.ones(5))

        def forward(self, x):
            return torch.relu(self.linear(x))

    layers = [Counted(), nn.Linear(8, 4, bias=False, dtype=torch.float64), Counted(), nn.ReLU()]
    pipeline = pipeline_of(group, (0, 2, 4), layers=layers, loss=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    x, y = torch.ones(8, 4, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)
    profiles = []
    for _ in range(2):
        pipeline.evaluate(x)
        optimizer.zero_grad()
        with LayerProfiler(pipeline, optimizer) as profiler:
            pipeline.step(x, target=y)
        profiles.append(profiler.gather())
        optimizer.step()
    (before, after), _ = gathered(group, profiles)
    weights = [8 * (4 * 8 + 8) + 4 * 5, 8 * 8 * 4, 8 * (4 * 8 + 8) + 4 * 5, 0]
    gradients = [8 * (4 * 8 + 8), 8 * 8 * 4, 8 * (4 * 8 + 8), 0]
    micro = 8 // pipelines.MICRO
    # Inputs of a linear layer, and outputs of a relu.
    activations = [8 * micro * (4 + 8), 8 * micro * 8, 8 * micro * (4 + 8), 8 * micro * 8]
    for profile in (before, after):
        assert [one.weight_bytes for one in profile.layers] == weights
        assert [one.gradient_bytes for one in profile.layers] == gradients
        assert [one.activation_bytes for one in profile.layers] == activations
    assert [one.optimizer_bytes for one in before.layers] == [0] * 4
    steps = [2 * 4, 4, 2 * 4, 0]
    assert [one.optimizer_bytes for one in after.layers] == [
        2 * size + step for size, step in zip(gradients, steps, strict=True)
    ]


def test_measuring_changes_no_results_and_leaves_nothing_behind(run_ranks):
    @for_each([(True,), (False,)])
    def check(rank, group, measures):
        pipeline = pipeline_of(group)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            words, target = batch(step)
            optimizer.zero_grad()
            if measures and step:
                with LayerProfiler(pipeline, optimizer) as profiler:
                    losses.append(pipeline.step(words, target=target))
                profiler.gather()
            else:
                losses.append(pipeline.step(words, target=target))
            optimizer.step()
        assert not pipeline.module.watchers.everyone
        return losses, pipelines.held(pipeline, optimizer)

    for (losses, measured), (others, plain) in run_ranks(check, 2):
        assert losses == others
        pipelines.assert_same(measured, plain)
