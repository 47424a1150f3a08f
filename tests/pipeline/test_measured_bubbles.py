"""How much of a step stages wait, by marks of real layers that sleep, and what is told of it."""

import json
import time

import pytest
import torch
from helpers.pipelines import World
from torch import nn

from zeroresize.pipeline import LayerProfiler, Pipeline, ProfileRecord
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.runtime.simulated_steps import simulated_step

MICRO, FORWARD_S, BACKWARD_S = 4, 0.02, 0.04


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        time.sleep(work * FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.work * BACKWARD_S)
        return dy.clone(), None


class Slept(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.linear, self.work = nn.Linear(4, 4), work

    def forward(self, x):
        return _Slept.apply(self.linear(x), self.work)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "works", "loss_work"),
    [("1f1b", [1.0, 1.0], 0.0), ("gpipe", [0.5, 2.0], 0.0), ("gpipe", [1.5, 0.5], 1.0)],
)
def test_the_measured_bubble_is_that_of_the_schedule(run_ranks, schedule, works, loss_work):
    def check(rank, group):
        def loss(outputs, target):
            return nn.functional.mse_loss(_Slept.apply(outputs, loss_work), target)

        layers = [Slept(work / 2) for work in works for _ in range(2)]
        pipeline = Pipeline(layers, loss, num_microbatches=MICRO, process_group=group, schedule=schedule)
        x = torch.ones(8, 4)
        for _ in range(2):
            with LayerProfiler(pipeline) as profiler:
                pipeline.step(x, target=x)
            profile = profiler.gather()
        return profile

    profile, other = run_ranks(check, 2)
    assert profile == other
    of_stages = [works[0], works[1] + loss_work]
    simulated = simulated_step(*([one * each_s for one in of_stages] for each_s in (FORWARD_S, BACKWARD_S)), MICRO,
                               schedule=schedule)  # fmt: skip
    expected = [idle_s / simulated.step_s for idle_s in simulated.idle_s]
    assert profile.bubble_ratios == pytest.approx(expected, abs=0.1)
    assert profile.loss_s >= MICRO * loss_work * (FORWARD_S + BACKWARD_S)
    assert profile.computed_s[1] - sum(one.forward_s + one.backward_s for one in profile.layers[2:]) == pytest.approx(
        profile.loss_s
    )


def test_ratios_are_of_the_slowest_stages_step():
    def layer(seconds):
        return LayerProfile(seconds / 2, seconds / 2, 1, 1, 1, 1)

    profile = PipelineProfile((layer(2.0), layer(1.0), layer(4.0)), (8.0, 10.0), (0, 2, 3), loss_s=1.0)
    assert profile.computed_s == (3.0, 5.0)
    assert profile.bubble_ratios == pytest.approx((0.7, 0.5))
    assert profile.bubble_ratio == pytest.approx(0.6)
    assert profile.imbalance == pytest.approx(2.0 / 4.0)
    nothing = PipelineProfile((layer(0.0), layer(0.0)), (0.0, 0.0), (0, 1, 2))
    assert nothing.bubble_ratios == (0.0, 0.0) and nothing.imbalance == 0.0


def test_a_record_tells_of_layers_stages_and_bubbles_in_plain_numbers():
    profile = World([3.0, 6.0, 3.0], [1.0, 1.0], (0, 2, 3)).profile()
    record = ProfileRecord.of(7, profile, "gpipe", 4)
    values = json.loads(json.dumps(record.to_dict()))
    assert values["kind"] == "profile" and values["step"] == 7 and values["boundaries"] == [0, 2, 3]
    assert [one["forward_s"] for one in values["layers"]] == pytest.approx([1.0, 2.0, 1.0])
    assert values["layers"][2]["optimizer_bytes"] == 2000
    assert ProfileRecord.from_dict(values) == record
    assert values["stage_s"] == pytest.approx([9.0, 3.0]) and values["imbalance"] == pytest.approx(1.0)
    # Of two stages the first takes 3/4 and 6/4 s for a micro-batch, the second a third of it: the first one's 9 s, and
    # at its turn from forwards to backwards what the second one takes for one micro-batch.
    assert values["simulated_step_s"] == pytest.approx(9.0 + 3.0 / 4)
    scalars = record.scalars()
    assert scalars["pipeline_stages/0_layers"] == 2.0 and scalars["pipeline_stages/1_bytes"] == 4100.0
