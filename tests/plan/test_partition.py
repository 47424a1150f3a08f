"""Partitions as values, and what they ask of stages."""

import math

import pytest
from helpers.pipelines import all_partitions, carried_out, fits_into, loads, slowest_of
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import PipelineLoad


@st.composite
def partitions(draw, num_layers=None):
    num_layers = num_layers or draw(st.integers(1, 20))
    inner = draw(st.sets(st.integers(1, max(num_layers - 1, 1))).filter(lambda own: max(own, default=0) < num_layers))
    return Partition((0, *sorted(inner), num_layers))


@given(partitions())
def test_every_layer_is_on_one_stage_and_in_order(partition):
    layers = [layer for stage in range(partition.num_stages) for layer in partition.layers_of(stage)]
    assert layers == list(range(partition.num_layers))
    assert partition.counts == tuple(len(partition.layers_of(stage)) for stage in range(partition.num_stages))
    for layer in layers:
        assert layer in partition.layers_of(partition.stages[layer])


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_uniform_partition_has_counts_that_differ_by_one_at_most(num_layers, num_stages):
    if num_layers < num_stages:
        with pytest.raises(ValueError, match=f"{num_layers} layers cannot be divided over {num_stages} stages"):
            Partition.uniform(num_layers, num_stages)
        return
    counts = Partition.uniform(num_layers, num_stages).counts
    assert sum(counts) == num_layers and len(counts) == num_stages and max(counts) - min(counts) <= 1


def test_boundaries_that_do_not_divide_the_layers_are_an_error():
    assert Partition.of([0, 1, 3], 3, 2) == Partition((0, 1, 3))
    assert Partition((0, 3, 5, 7)).stages == [0, 0, 0, 1, 1, 2, 2]
    for wrong in ([0, 3], [0, 3, 3], [1, 2, 3], [0, 2, 1], [0, 1, 4], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="do not divide 3 layers over 2 stages"):
            Partition.of(wrong, 3, 2)
    with pytest.raises(ValueError, match="2 layers cannot be divided over 3 stages"):
        Partition.of([0, 1, 1, 2], 2, 3)
    for wrong in ((), (0,), (1, 2), (0, 2, 2, 4), (0, 3, 2)):
        with pytest.raises(ValueError, match="boundaries"):
            Partition(wrong)


@given(st.integers(1, 12).flatmap(lambda own: st.tuples(partitions(own), partitions(own))))
def test_carrying_out_transfers_gives_the_other_partition_and_moves_nothing_else(two):
    before, after = two
    transfers = before.transfers_to(after)
    if before.num_stages >= after.num_stages:
        *_, stages = carried_out(before, transfers)
        assert stages[: after.num_stages] == [list(after.layers_of(stage)) for stage in range(after.num_stages)]
        assert not any(stages[after.num_stages :])
    assert [one.layer for one in transfers] == [
        layer for layer in range(before.num_layers) if before.stages[layer] != after.stages[layer]
    ]


def test_stages_of_the_other_partition_may_be_named():
    transfers = Partition((0, 1, 2, 4)).transfers_to(Partition((0, 2, 4)), stages=(1, 2))
    assert [(one.layer, one.source, one.destination) for one in transfers] == [(0, 0, 1)]
    for after, stages in ((Partition((0, 2, 3)), (1, 2)), (Partition((0, 2, 4)), (1,))):
        with pytest.raises(ValueError, match="cannot become"):
            Partition((0, 1, 2, 4)).transfers_to(after, stages=stages)


@given(loads(), st.data())
def test_loads_of_stages_are_the_sums_of_their_layers(load, data):
    partition = data.draw(st.sampled_from(list(all_partitions(load.num_layers, load.num_stages))))
    assert load.slowest(partition) == slowest_of(load, partition)
    assert load.fits(partition) == fits_into(load, partition)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"costs": [1.0, -1.0, 2.0]}, r"costs\[1\]=-1.0"),
        ({"costs": [1.0, math.nan, 2.0]}, r"costs\[1\]=nan"),
        ({"costs": [math.inf, 1.0, 2.0]}, r"costs\[0\]=inf"),
        ({"costs": [1.0]}, "1 layers cannot be divided over 2 stages"),
        ({"num_stages": 0}, "cannot be divided over 0 stages"),
        ({"speeds": [1.0, 0.0]}, r"speeds\[1\]=0.0.*above zero"),
        ({"speeds": [1.0, math.inf]}, r"speeds\[1\]=inf"),
        ({"speeds": [1.0]}, "not one number for each of 2"),
        ({"layer_bytes": [1, 1, 1]}, "together"),
        ({"memory_limits": [1, 1]}, "together"),
        ({"layer_bytes": [1, 1], "memory_limits": [1, 1]}, "layer_bytes .* not one number for each of 3"),
        ({"layer_bytes": [1, 1, -1], "memory_limits": [1, 1]}, r"layer_bytes\[2\]=-1"),
        ({"layer_bytes": [1, 1, 1], "memory_limits": [1, math.nan]}, r"memory_limits\[1\]=nan"),
    ],
)
def test_what_cannot_be_balanced_is_an_error(wrong, message):
    arguments = {"costs": [1.0, 2.0, 3.0], "num_stages": 2, **wrong}
    with pytest.raises(ValueError, match=message):
        PipelineLoad.of(arguments.pop("costs"), arguments.pop("num_stages"), **arguments)
