"""What a run would need, found out on any machine: no GPU, no process group, the model on torch's meta device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch import nn

from vit_examples.config import RunConfig
from vit_examples.data import expand_variables, local_path, unset_variables
from vit_examples.model import build_vit, parallel_style


@dataclass(frozen=True)
class Requirements:
    """Of one rank: ``parameters`` are counted, everything else is in bytes; ``activations`` are an estimate."""

    parameters: int
    weights: int
    gradients: int
    adamw: int
    master_weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.adamw + self.master_weights + self.activations


def dry_run(config: RunConfig, *, num_ranks: int) -> Requirements:
    """Check ``config`` for ``num_ranks`` ranks and print, on rank 0 if under torchrun, what each of them needs.

    Raises:
        ValueError: naming what does not fit.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks}: at least 1 is needed")
    config.validate_group_size(num_ranks)
    model = build_vit(config.model, num_ranks=num_ranks, seed=0, device="meta")
    whole = sum(parameter.numel() for parameter in model.parameters())
    needed = requirements(config, model, num_ranks)
    if os.environ.get("RANK", "0") == "0":
        _print(config, num_ranks, whole, needed)
    return needed


def requirements(config: RunConfig, model: nn.Module, num_ranks: int) -> Requirements:
    """Parameters and bytes of one of ``num_ranks`` ranks."""
    parameters = sum(
        parameter.numel() // (num_ranks if _is_split(config, name) else 1)
        for name, parameter in model.named_parameters()
    )
    # Colossal-AI's mixed precision holds 16-bit weights and fp32 masters, whose fp32 gradients replace the 16-bit ones
    # in the step; autocast on plain torch holds fp32 weights only.
    has_masters = config.host == "colossalai" and config.training.precision != "fp32"
    return Requirements(
        parameters=parameters,
        weights=parameters * (2 if has_masters else 4),
        gradients=parameters * 4,
        adamw=parameters * 8,
        master_weights=parameters * 4 if has_masters else 0,
        activations=activation_bytes(config, num_ranks),
    )


def activation_bytes(config: RunConfig, num_ranks: int) -> int:
    """Estimate of what forward keeps for backward, of one micro-batch, on one rank.

    Of each token and layer: on every rank the inputs and outputs of both layer norms (4 H), and of the rank's share
    q, k, v and the attention's output (4 H/R), FC1's output and the activation function's (2 M/R). Attention
    probabilities are not kept (scaled_dot_product_attention). With activation checkpointing each layer keeps its
    input (H), and one layer everything.
    """
    model, training = config.model, config.training
    mlp_size = model.mlp_size or 4 * model.hidden_size
    tokens = training.batch_size // training.accumulation * model.num_tokens
    per_token = 4 * model.hidden_size + (4 * model.hidden_size + 2 * mlp_size) // num_ranks
    values = model.depth * per_token
    if training.activation_checkpointing:
        values = model.depth * model.hidden_size + per_token
    return tokens * values * (4 if training.precision == "fp32" else 2)


def data_line(source: str) -> str:
    """Whether the data are here, as far as can be said without opening them."""
    for name in unset_variables(source):
        return f"warning: data: {source} not found on this machine: the environment variable {name} is not set"
    expanded = expand_variables(source)
    path = local_path(expanded)
    if expanded == "mnist5k":
        return f"data: {expanded}"
    if path is None:
        return f"data: no folder {expanded} here, so the name of a data set on the Hugging Face hub; not looked for"
    if not path.is_dir():
        if path.exists():
            return f"warning: data: {expanded} is a file, not a folder"
        return f"warning: data: {expanded} not found on this machine: no such folder"
    return f"data: {expanded}; the pictures were not opened"


def _is_split(config: RunConfig, name: str) -> bool:
    style = parallel_style(name)
    if config.host == "colossalai" and name.startswith("classifier."):
        return True
    return style == "column" or (style == "row" and name.endswith(".weight"))


def _print(config: RunConfig, num_ranks: int, whole: int, needed: Requirements) -> None:
    model, training = config.model, config.training
    table = Table(
        title=f"one of {num_ranks} ranks, {config.host}, {training.precision}, batch {training.batch_size} × "
        f"{model.num_tokens} tokens",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_row("parameters, whole model", f"{whole:,}")
    table.add_row("parameters, this rank", f"{needed.parameters:,}", end_section=True)
    rows = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "AdamW moments, fp32": needed.adamw,
        "master weights, fp32": needed.master_weights,
        "activations, estimated": needed.activations,
    }
    for name, size in rows.items():
        table.add_row(name, _gib(size))
    table.add_section()
    table.add_row("together", _gib(needed.total))
    table.add_row("host memory while building (whole model, fp32)", _gib(4 * whole))
    console = Console()
    console.print(data_line(config.data.source), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    sound = f"balance mode {config.balance.mode}: the configuration is sound"
    console.print(sound, markup=False, highlight=False, soft_wrap=True)


def _gib(num_bytes: int) -> str:
    """Three decimals: they tell small models apart, and align."""
    return f"{num_bytes / 2**30:,.3f} GiB"
