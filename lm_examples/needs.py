"""What ranks hold and need under a strategy, counted with the model on torch's meta device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from vit_examples.harness.dry_run import Needs
from zeroresize.pipeline.stage_layers import divided_by_parameters
from zeroresize.plan.partition import Partition
from zeroresize.plan.strategy import Strategy


def first_boundaries(chosen: str | tuple[int, ...], layers: Sequence[nn.Module], num_stages: int) -> tuple[int, ...]:
    """The boundaries with which training begins; ValueError where they do not fit the layers and stages."""
    if isinstance(chosen, tuple):
        return Partition.of(chosen, len(layers), num_stages).boundaries
    divided = Partition.uniform(len(layers), num_stages) if chosen == "uniform" else None
    return (divided or divided_by_parameters(layers, num_stages)).boundaries


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


def rank_needs(config: Any, strategy: Strategy, optimizer_strategy: Strategy, num_ranks: int) -> list[Needs]:
    """[R] of each rank while ``strategy`` is in force.

    Args:
        config: whose ``token_bytes(number, share)`` estimates what forward of a layer keeps of one token for backward,
            where a rank has a share of its heads and neurons; ``held_tokens(strategy, stage)`` are kept at once.
    """
    tensors, partition = config.tensors(), strategy.partition(config.model.num_layers)
    here, of_optimizer = (
        held_under.layout(tensors, num_ranks, config.model.num_layers).rank_bytes(tensors).tolist()
        for held_under in (strategy, optimizer_strategy)
    )
    names = stage_names(partition.boundaries)
    itemsize, computing = tensors[0].itemsize, config.training.computing_dtype.itemsize
    needs = []
    for rank in range(num_ranks):
        weights, gradients = here[rank], here[rank] + (of_optimizer[rank] if strategy != optimizer_strategy else 0)
        if config.training.compute_dtype is not None:
            weights = round(computing / itemsize * here[rank]) + of_optimizer[rank]
        position = strategy.position_of(rank)
        layers, activations = "left out", 0.0
        if position is not None:
            share = (strategy.shares[position.shard] if strategy.shares else 1.0) / strategy.tp
            layers = names[position.stage]
            kept = sum(config.token_bytes(number, share) for number in partition.layers_of(position.stage))
            activations = kept * config.held_tokens(strategy, position.stage)
        optimizer = 2 * of_optimizer[rank]
        needs.append(Needs(layers, here[rank] // itemsize, weights, gradients, optimizer, round(activations)))
    return needs
