"""How layers are divided before anything was measured: by their parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zeroresize.pipeline.stage_layers import require_ties_within_stages
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


def divided_by_parameters(layers: Sequence[nn.Module], num_stages: int) -> Partition:
    """Return the partition whose largest stage has the fewest parameters, those that are frozen included.

    Where equally many layers on each stage are as good, it is that one, and where layers that share parameters would
    be parted.

    Args:
        layers: [L]; their tensors may be on the meta device.
        num_stages: S.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    uniform = Partition.uniform(len(layers), num_stages)
    load = PipelineLoad.of([float(num_parameters(layer)) for layer in layers], num_stages)
    balanced = balanced_partition(load)
    if load.slowest(balanced) >= load.slowest(uniform):
        return uniform
    try:
        require_ties_within_stages(layers, balanced.boundaries)
    except ValueError:
        return uniform
    return balanced


def num_parameters(layer: nn.Module) -> int:
    """Return how many elements the parameters of a layer have."""
    return sum(parameter.numel() for parameter in layer.parameters())
