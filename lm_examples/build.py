"""A run's layers, and which stage begins with which."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.pipeline_config import RunConfig
from zeroresize.pipeline.first_boundaries import divided_by_parameters
from zeroresize.plan.partition import Partition


def build_layers(config: RunConfig, case: DynamicCase, device: str = "cpu") -> list[nn.Module]:
    """Embedding, blocks and head, the same on every rank."""
    torch.manual_seed(config.training.seed)
    with torch.device(device):
        layers = [case.embedding(), *map(case.block, range(config.model.num_blocks)), case.head()]
    return [layer.to(getattr(torch, config.training.dtype)) for layer in layers]


def first_boundaries(config: RunConfig, layers: Sequence[nn.Module], num_stages: int) -> tuple[int, ...]:
    """The boundaries with which training begins.

    Raises:
        ValueError: if there are fewer layers than stages, or the list of ``pipeline.boundaries`` does not fit.
    """
    chosen = config.pipeline.boundaries
    if isinstance(chosen, tuple):
        return Partition.of(chosen, len(layers), num_stages).boundaries
    if chosen == "uniform":
        return Partition.uniform(len(layers), num_stages).boundaries
    return divided_by_parameters(layers, num_stages).boundaries


def stage_names(boundaries: Sequence[int]) -> list[str]:
    """Which layers each stage has, in words: of embedding, blocks and head."""
    last = boundaries[-1] - 1
    names = []
    for begin, end in itertools.pairwise(boundaries):
        blocks = range(max(begin, 1), min(end, last))
        parts = ["embedding"] if begin == 0 else []
        if blocks:
            numbers = f"{blocks[0] - 1}" if len(blocks) == 1 else f"{blocks[0] - 1} to {blocks[-1] - 1}"
            parts.append(f"block{'s' if len(blocks) > 1 else ''} {numbers}")
        names.append(", ".join(parts + (["head"] if end == last + 1 else [])))
    return names
