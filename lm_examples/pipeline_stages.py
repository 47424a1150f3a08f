"""A pipeline's layers, which stage begins with which, and what each stage needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.pipeline_config import RunConfig
from vit_examples.harness.dry_run import Needs
from zeroresize.pipeline.stage_layers import divided_by_parameters, num_parameters
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


def stage_needs(config: RunConfig, num_stages: int) -> list[Needs]:
    """Of each stage, with the layers on torch's meta device."""
    layers, training = build_layers(config, config.make_case(), "meta"), config.training
    boundaries = first_boundaries(config, layers, num_stages)
    itemsize = getattr(torch, training.dtype).itemsize
    needs = []
    for stage, (name, (begin, end)) in enumerate(
        zip(stage_names(boundaries), itertools.pairwise(boundaries), strict=True)
    ):
        parameters = sum(map(num_parameters, layers[begin:end]))
        weights = sum(each.nbytes for layer in layers[begin:end] for each in (*layer.parameters(), *layer.buffers()))
        held = training.micro_batches
        if config.pipeline.schedule == "1f1b":
            held = min(held, num_stages - stage)
        activations = held * sum(activation_bytes(config, number) for number in range(begin, end))
        needs.append(Needs(name, parameters, weights, parameters * itemsize, 2 * parameters * itemsize, activations))
    return needs


def activation_bytes(config: RunConfig, number: int) -> int:
    """Estimate of what forward of layer ``number`` keeps for backward, of one micro-batch, with all work done.

    Of each token: of a block the inputs, normalised inputs and outputs of both layer norms and of the attention (5 D),
    q, k and v (3 D), and the outputs of the first product and of GELU (2 M); of the head its norm's input and output
    (2 D) and the logits (V), which belong to the loss; of the embedding the number of the token.
    """
    model, training = config.model, config.training
    itemsize = getattr(torch, training.dtype).itemsize
    tokens = training.batch_size // training.micro_batches * model.context
    if number == 0:
        return tokens * torch.int64.itemsize
    if number == config.num_layers - 1:
        return tokens * (2 * model.hidden_size + model.vocabulary) * itemsize
    return tokens * (8 * model.hidden_size + 2 * model.feed_forward_size) * itemsize
