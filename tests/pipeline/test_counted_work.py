"""Layers' work is counted in every block, and a profile tells the seconds of the mean block."""

import math
import types

import pytest
import torch
from helpers import sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.sleeping_layers import BACKWARD_S, FORWARD_S, MICRO, Pace, layers_of
from torch import nn

from zeroresize.pipeline import Pipeline, PipelineBalancer
from zeroresize.pipeline.measuring import GivenRows, WorkCounter

pytestmark = pytest.mark.same_ranks


def pipeline_of(layers):
    """What a counter looks at of a pipeline."""
    return types.SimpleNamespace(layers=layers, present=range(len(layers)))


def counted(counter, counts, *blocks):
    for block in blocks:
        counter.begin_block()
        counts[:] = block
        counter.end_block()


def counter_of(num_layers):
    layers, counts = [nn.Identity() for _ in range(num_layers)], [0.0] * num_layers
    pipeline = pipeline_of(layers)
    return WorkCounter(pipeline, lambda layer: counts[layers.index(layer)]), counts, pipeline


def test_seconds_are_scaled_to_the_mean_count_of_the_blocks_since_the_last_profile():
    counter, counts, _ = counter_of(2)
    counted(counter, counts, *[[1.0, 6.0]] * 8)
    counter.measured_block()
    counted(counter, counts, *[[1.0, 6.0]] * 7, [9.0, 6.0])
    block = counter.measured_block()  # the mean is (7 + 9) / 8 = 2
    assert block.mean_seconds(0, 9.0, 18.0) == pytest.approx((2.0, 4.0))
    assert block.mean_seconds(1, 9.0, 18.0) == pytest.approx((9.0, 18.0))


class Experts(nn.Module):
    """Rows that begin with a positive number go to the first of two matrices, the others to the second."""

    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(4), nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 2)])

    def forward(self, x):
        is_first = x[..., 0] > 0
        self.norm(x)
        return [self.experts[0](x[is_first]), self.experts[1](input=x[~is_first])]


def test_rows_that_matrices_are_given_are_counted_times_their_elements():
    layers = [Experts(), nn.Embedding(100, 4)]
    rows = GivenRows(layers)
    x = torch.randn(3, 5, 4)
    x[..., 0] = -1.0
    x[0, :2, 0] = 1.0
    layers[0](x), layers[0](x)
    layers[1](torch.zeros(3, 5, dtype=torch.int64))
    assert rows(layers[0]) == 2 * (2 * 4 * 8 + 13 * 4 * 2)
    assert rows(layers[1]) == 0.0  # rows are looked up
    rows.reset()
    assert rows(layers[0]) == 0.0
    del rows
    assert not any(one._forward_pre_hooks for layer in layers for one in layer.modules())


def trained(group, num_steps, tokens_of, **options):
    """The records of profiles of two layers, of which the second one's work is that of ``tokens_of(step)`` rows."""
    pace, records, counts = Pace(), [], {}
    pace.keep_time()
    layers = layers_of(2, pace)
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=group)
    balancer = PipelineBalancer(
        pipeline,
        None,
        max_measuring=math.inf,
        on_profile=records.append,
        count_work=lambda layer: counts[layer.number],
        **options,
    )
    for step in range(num_steps):
        counts.update({0: 1.0, 1: tokens_of(step)})
        pace.of_layers[1] = tokens_of(step)
        x, target = sleeping_layers.batch(step)
        with balancer.step():
            pipeline.step(x, target=target)
    return records


@on_ranks(2)
def test_a_profile_tells_the_mean_block_of_a_layer_whose_tokens_change(rank, group):
    """Three times as many in each block that is measured, 1, 11, 21, ..."""

    first, second = gathered(group, trained(group, 33, lambda step: 3.0 if step % 10 == 1 else 1.0, profile_every=10))
    assert [one.layers for one in first] == [one.layers for one in second]
    assert [one.step for one in first] == [3, 13, 23, 33]
    for record, mean in zip(first[1:], (1.2, 1.2, 1.2), strict=True):  # of ten blocks
        forward_s, backward_s = ([getattr(one, name) for one in record.layers] for name in ("forward_s", "backward_s"))
        assert forward_s == pytest.approx([MICRO * FORWARD_S, mean * MICRO * FORWARD_S])
        assert backward_s == pytest.approx([MICRO * BACKWARD_S, mean * MICRO * BACKWARD_S])


@on_ranks(2)
def test_work_that_cannot_be_counted_is_an_error_on_every_rank(rank, group):
    def tokens_of(step):
        return -1.0 if rank == 1 else 1.0

    with pytest.raises(ValueError, match=r"count_work failed on stages \[1\]") as caught:
        trained(group, 4, tokens_of, profile_every=1)
    first, second = gathered(group, str(caught.value))
    assert first == "count_work failed on stages [1]"
    assert second.startswith(first) and "count_work returned -1.0 for layer 1" in second
