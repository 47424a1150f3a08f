"""What a run would need, found out on any machine: no process group, the model on torch's meta device.

``L`` layers, ``S`` stages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lm_examples.build import build_layers, first_boundaries
from lm_examples.config import RunConfig
from lm_examples.recorder import stage_names
from zeroresize.pipeline.first_boundaries import num_parameters
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


@dataclass(frozen=True)
class StageNeeds:
    """Of one stage at first: ``parameters`` are counted, everything else is in bytes; ``activations`` are an estimate.

    Attributes:
        layers: in words.
        activations: of all micro-batches that the stage holds at once.
    """

    layers: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def dry_run(config: RunConfig, num_stages: int, *, console: Console | None = None) -> list[StageNeeds]:
    """Check ``config`` for ``num_stages`` stages and print, on rank 0 if under torchrun, what each of them needs.

    Raises:
        ValueError: naming what does not fit.
    """
    if num_stages < 1:
        raise ValueError(f"--ranks {num_stages}: at least 1 is needed")
    config.validate_stages(num_stages)
    layers = build_layers(config, config.make_case(), "meta")
    partition = Partition(first_boundaries(config, layers, num_stages))
    itemsize = getattr(torch, config.training.dtype).itemsize
    needs = []
    for stage, name in enumerate(stage_names(partition.boundaries)):
        stage_layers = partition.layers_of(stage)
        parameters = sum(num_parameters(layers[number]) for number in stage_layers)
        weights = sum(_weight_bytes(layers[number]) for number in stage_layers)
        activations = sum(activation_bytes(config, number) for number in stage_layers)
        needs.append(
            StageNeeds(
                name,
                parameters,
                weights,
                parameters * itemsize,
                2 * parameters * itemsize,
                activations * micro_batches_held(config, stage, num_stages),
            )
        )
    over = _over_limits(config, layers, partition)
    if os.environ.get("RANK", "0") == "0":
        _print(config, needs, over, console or Console())
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


def micro_batches_held(config: RunConfig, stage: int, num_stages: int) -> int:
    """Of how many micro-batches a stage keeps activations at once, at most."""
    most = config.training.micro_batches
    return most if config.pipeline.schedule == "gpipe" else min(most, num_stages - stage)


def _over_limits(config: RunConfig, layers: Sequence[nn.Module], partition: Partition) -> list[int]:
    """The stages that have too little memory for their first layers; the balancer relieves them at its first profile.

    Activations count as if each stage held as many micro-batches as the first one, as the balancer counts them.

    Raises:
        ValueError: if no boundaries fit into the limits.
    """
    limits = config.balance.memory_limits
    if limits is None or not config.balance.is_on:
        return []
    itemsize = getattr(torch, config.training.dtype).itemsize
    held = micro_batches_held(config, 0, partition.num_stages)
    layer_bytes = [
        _weight_bytes(layer) + 3 * num_parameters(layer) * itemsize + held * activation_bytes(config, number)
        for number, layer in enumerate(layers)
    ]
    load = PipelineLoad.of(layer_bytes, partition.num_stages, layer_bytes=layer_bytes, memory_limits=limits)
    try:
        balanced_partition(load)
    except ValueError as error:
        raise ValueError(f"balance.memory_limits: {error}") from error
    return [stage for stage, size in enumerate(load.stage_bytes(partition)) if size > limits[stage]]


def _weight_bytes(layer: nn.Module) -> int:
    return sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))


def _print(config: RunConfig, needs: Sequence[StageNeeds], over: Sequence[int], console: Console) -> None:
    training = config.training
    table = Table(
        title=f"{len(needs)} stages, {config.pipeline.schedule}, case {config.case.name}, {training.dtype}, "
        f"{training.micro_batches} micro-batches of {training.batch_size // training.micro_batches} × "
        f"{config.model.context} tokens",
        title_justify="left",
    )
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for heading in ("parameters", "weights", "gradients", "AdamW", "activations, estimated", "total"):
        table.add_column(heading, justify="right")
    for stage, of_stage in enumerate(needs):
        sizes = (of_stage.weights, of_stage.gradients, of_stage.optimizer, of_stage.activations, of_stage.total)
        table.add_row(
            str(stage), of_stage.layers, f"{of_stage.parameters:,}", *(f"{one / 1e6:,.1f} MB" for one in sizes)
        )
    console.print(table)
    for stage in over:
        console.print(f"stage {stage} is over its limit (balance.memory_limits): layers leave it at the first profile")
