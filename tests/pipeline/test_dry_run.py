"""Profiles, their records, and dry runs: what a pipeline would be like, from them and from layers without memory."""

import json

import pytest
import torch
from helpers.pipelines import World
from torch import nn

from zeroresize.pipeline import LayerProfile, ProfileRecord, plan_pipeline, profiles_on_meta
from zeroresize.runtime.simulated_steps import simulated_step

MICRO = 8


def layer(seconds, weight_bytes=100, activation_bytes=10):
    return LayerProfile(seconds / 3, 2 * seconds / 3, weight_bytes, weight_bytes, 2 * weight_bytes, activation_bytes)


def test_a_plan_tells_boundaries_seconds_bytes_and_bubbles():
    layers = [layer(one) for one in (1.0, 1.0, 1.0, 3.0)]
    plan = plan_pipeline(layers, 2, num_microbatches=MICRO)
    assert plan.boundaries == (0, 3, 4) and plan.stage_s == pytest.approx((3.0, 3.0))
    # 1F1B keeps two micro-batches on the first of two stages, and one on the last.
    assert plan.stage_bytes == (3 * (400 + 2 * 10), 400 + 10)
    step = simulated_step([1.0 / MICRO] * 2, [2.0 / MICRO] * 2, MICRO)
    assert (plan.step_s, plan.bubble_ratio) == pytest.approx((step.step_s, step.bubble_ratio))
    even = plan_pipeline(layers, 2, num_microbatches=MICRO, schedule="gpipe", boundaries=(0, 2, 4))
    assert even.boundaries == (0, 2, 4) and even.stage_s == pytest.approx((2.0, 4.0))
    assert even.stage_bytes == (2 * (400 + MICRO * 10),) * 2
    assert even.step_s > plan.step_s and even.bubble_ratio > plan.bubble_ratio


def test_speeds_and_memory_limits_count():
    layers = [layer(1.0) for _ in range(6)]
    slow = plan_pipeline(layers, 2, num_microbatches=MICRO, speeds=[1.0, 0.5])
    assert slow.boundaries == (0, 4, 6) and slow.stage_s == pytest.approx((4.0, 4.0))
    tight = plan_pipeline(layers, 2, num_microbatches=MICRO, speeds=[1.0, 0.5], memory_limits=[1300.0, 9000.0])
    assert tight.boundaries == (0, 3, 6)
    by_bytes = [layer(1.0, 100 if number else 500) for number in range(6)]
    assert plan_pipeline(by_bytes, 2, num_microbatches=MICRO, by="parameters").boundaries == (0, 1, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 7}, "6 layers"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"memory_limits": [10.0, 10.0]}, "no partition of 6 layers over 2 stages fits"),
        ({"speeds": [1.0]}, "speeds"),
        ({"boundaries": (0, 6)}, "do not divide"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    options = {"num_stages": 2, "num_microbatches": MICRO} | options
    with pytest.raises(ValueError, match=message):
        plan_pipeline([layer(1.0) for _ in range(6)], options.pop("num_stages"), **options)


def test_layers_without_memory_are_counted_as_real_ones_are():
    class Block(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.up = nn.Linear(8, 32, bias=False, dtype=torch.float64, device=device)
            self.down = nn.Linear(32, 8, dtype=torch.float64, device=device)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    layers = [nn.Embedding(5, 8, dtype=torch.float64, device="meta"), Block("meta"), Block("meta")]
    layers[2].up.weight.requires_grad_(False)
    words = torch.empty(2, 3, dtype=torch.int64, device="meta")
    embedding, block, frozen = profiles_on_meta(layers, words, num_microbatches=MICRO, flops_per_s=1e3)
    product = 2 * 2 * 3 * 8 * 32
    assert (embedding.forward_s, embedding.backward_s) == (0.0, 0.0)
    assert block.forward_s == pytest.approx(MICRO * 2 * product / 1e3)
    assert block.backward_s == pytest.approx(MICRO * 4 * product / 1e3)
    assert frozen.backward_s == pytest.approx(MICRO * 3 * product / 1e3)
    assert block.weight_bytes == 8 * (2 * 8 * 32 + 8) and block.optimizer_bytes == 2 * block.gradient_bytes
    assert frozen.gradient_bytes == 8 * (8 * 32 + 8)
    # x of the first product, and relu's output, which is x of the second one.
    assert block.activation_bytes == 8 * 2 * 3 * (8 + 32)


@pytest.mark.parametrize(
    ("layers", "inputs", "flops_per_s", "message"),
    [
        ([nn.Linear(2, 2)], torch.empty(1, 2, device="meta"), 1.0, r"layers\.0\.weight is on cpu"),
        ([nn.Linear(2, 2, device="meta")], torch.ones(1, 2), 1.0, "inputs are not on the meta device"),
        ([], torch.empty(1, 2, device="meta"), 0.0, "flops_per_s=0.0"),
    ],
)
def test_only_layers_without_memory_are_counted(layers, inputs, flops_per_s, message):
    with pytest.raises(ValueError, match=message):
        profiles_on_meta(layers, inputs, num_microbatches=1, flops_per_s=flops_per_s)


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
