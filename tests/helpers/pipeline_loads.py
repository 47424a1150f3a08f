"""Small pipelines with layers of whole costs, and what trying every partition finds."""

import itertools

from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


@st.composite
def loads(draw, max_layers=8, max_stages=5, is_limited=None, speeds=(0.5, 1.0, 2.0, 4.0)):
    """Costs and speeds whose quotients are exact."""
    num_layers = draw(st.integers(1, max_layers))
    num_stages = draw(st.integers(1, min(num_layers, max_stages)))

    def numbers(values, length):
        return draw(st.lists(values, min_size=length, max_size=length))

    memory = {}
    if draw(st.booleans()) if is_limited is None else is_limited:
        memory["layer_bytes"] = numbers(st.integers(0, 6), num_layers)
        memory["memory_limits"] = numbers(st.integers(3, 16), num_stages)
    costs = numbers(st.integers(0, 12), num_layers)
    return PipelineLoad.of(costs, num_stages, speeds=numbers(st.sampled_from(speeds), num_stages), **memory)


def all_partitions(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield Partition((0, *inner, num_layers))


def slowest_of(load, partition):
    return max(
        sum(load.costs[layer] for layer in partition.layers_of(stage)) / load.speeds[stage]
        for stage in range(partition.num_stages)
    )


def fits_into(load, partition):
    return all(
        sum(load.layer_bytes[layer] for layer in partition.layers_of(stage)) <= load.memory_limits[stage]
        for stage in range(partition.num_stages)
    )


def fastest_possible(load):
    """The time of the slowest stage in the best of all partitions that fit; None where none does."""
    tried = all_partitions(load.num_layers, load.num_stages)
    return min((slowest_of(load, one) for one in tried if fits_into(load, one)), default=None)


def carried_out(start, transfers):
    """Every stage's layers, in order, after each of the transfers in turn; checks that the layer was at its source."""
    stages = [list(start.layers_of(stage)) for stage in range(start.num_stages)]
    yield [list(own) for own in stages]
    for transfer in transfers:
        stages[transfer.source].remove(transfer.layer)
        stages[transfer.destination] = sorted([*stages[transfer.destination], transfer.layer])
        yield [list(own) for own in stages]
