"""What a run would need, found out on any machine: no GPU, no process group, the model on torch's meta device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch import nn

from vit_examples.config import RunConfig
from vit_examples.data import expand_variables, local_path, unset_variables
from vit_examples.model import build_vit, parallel_style
from zeroresize.plan.ownership import SegmentWork, checked_shares, neuron_quantum, unit_counts
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes


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


def dry_run(config: RunConfig, num_ranks: int) -> list[Requirements]:
    """Check ``config`` for ``num_ranks`` ranks and print, on rank 0 if under torchrun, what each of them needs.

    By even shares all need the same; a column of the table is of ranks that do. Shares that are to be measured
    (``"auto"``) are taken to be even. With ``balance.memory_limits`` units are divided as training begins with them.

    Raises:
        ValueError: naming what does not fit.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks}: at least 1 is needed")
    config.validate_group_size(num_ranks)
    model = build_vit(config.model, num_ranks=num_ranks, seed=0, device="meta")
    whole = sum(parameter.numel() for parameter in model.parameters())
    shares = _shares_at_start(config, model, num_ranks)
    needed = [_requirements(config, model, _Part.of(config, shares, rank)) for rank in range(num_ranks)]
    fitting = _fitting_shares(config, model, shares)
    if os.environ.get("RANK", "0") == "0":
        _print(config, num_ranks, whole, needed, fitting)
    return needed


def _shares_at_start(config: RunConfig, model: nn.Module, num_ranks: int) -> Sequence[float]:
    """By which shares units are divided when training begins; activations are not known then.

    Raises:
        ValueError: if the ranks' memory does not suffice without them.
    """
    balance = config.balance
    shares = (1.0,) * num_ranks if isinstance(balance.shares, str) else checked_shares(balance.shares, num_ranks)
    if balance.memory_limits is None:
        return shares
    memory = _memory(config, model, num_ranks, counts_activations=False)
    if isinstance(balance.shares, str):
        shares = memory.at_start
    if (why := memory.why_too_much(shares)) is not None:
        raise ValueError(f"balance.memory_limits, activations not counted: {why}")
    return shares


def _fitting_shares(config: RunConfig, model: nn.Module, at_start: Sequence[float]) -> Sequence[float]:
    """The shares by which every rank fills the same part of its memory with all that training holds.

    Args:
        at_start: the shares to begin with, which stay where nothing moves units; they fit where there are no limits.

    Raises:
        ValueError: if a rank has not the memory.
    """
    if config.balance.memory_limits is None:
        return at_start
    memory = _memory(config, model, len(at_start), counts_activations=True)
    shares = memory.evenly_filled
    if (why := memory.why_too_much(shares)) is not None:
        raise ValueError(f"balance.memory_limits: even where all ranks fill the same part of their memory, {why}")
    if not config.balance.may_move and (why := memory.why_too_much(at_start)) is not None:
        raise ValueError(
            f"balance.memory_limits: with activations {why}, and no units move in this mode: shares that fit are "
            f"{[round(share, 3) for share in shares]}"
        )
    return shares


def _memory(config: RunConfig, model: nn.Module, num_ranks: int, *, counts_activations: bool) -> GroupMemory:
    assert config.balance.memory_limits is not None
    without, even = (
        _requirements(config, model, _Part(share, share, 1.0 / num_ranks)) for share in (0.0, 1.0 / num_ranks)
    )
    fixed, whole = (needs.total - (0 if counts_activations else needs.activations) for needs in (without, even))
    held = [HeldBytes(fixed, whole - fixed)] * num_ranks
    return GroupMemory(config.balance.memory_limits, held, _segments(config, num_ranks))


def _requirements(config: RunConfig, model: nn.Module, part: _Part) -> Requirements:
    """Parameters and bytes of a rank that owns this part."""
    parameters = sum(
        round(parameter.numel() * part.of_parameter(config, name)) for name, parameter in model.named_parameters()
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
        activations=activation_bytes(config, part),
    )


@dataclass(frozen=True)
class _Part:
    """What one rank owns of the attention heads, of the feed-forward neurons, and of what is always split evenly."""

    heads: float
    neurons: float
    even: float

    @classmethod
    def of(cls, config: RunConfig, shares: Sequence[float], rank: int) -> _Part:
        checked = checked_shares(shares, len(shares))
        heads, neurons = (
            unit_counts(checked, segment)[rank] / segment.num_units for segment in _segments(config, len(shares))
        )
        return cls(heads, neurons, 1.0 / len(shares))

    def of_parameter(self, config: RunConfig, name: str) -> float:
        """Which share of a parameter of the model the rank holds."""
        style = parallel_style(name)
        if style == "column" or (style == "row" and name.endswith(".weight")):
            return self.heads if ".attention." in name else self.neurons
        is_padded_classifier = config.host == "colossalai" and name.startswith("classifier.")
        return self.even if is_padded_classifier else 1.0


def _segments(config: RunConfig, num_ranks: int) -> tuple[SegmentWork, SegmentWork]:
    """The heads of a layer and its neurons, with their parts of its products."""
    model = config.model
    mlp_size = model.mlp_size or 4 * model.hidden_size
    of_heads = 4 * model.hidden_size / (4 * model.hidden_size + 2 * mlp_size)
    neurons = SegmentWork(mlp_size, neuron_quantum(mlp_size, num_ranks), 1.0 - of_heads)
    return SegmentWork(model.num_heads, 1, of_heads), neurons


def activation_bytes(config: RunConfig, part: _Part) -> int:
    """Estimate of what forward keeps for backward, of one micro-batch, on one rank.

    Of each token and layer: on every rank the inputs and outputs of both layer norms (4 H) and what these norms divide
    by (4), and of the rank's share q, k, v, the attention's output by heads and by tokens (5 H), a number of each
    head's softmax, FC1's output and the activation function's (2 M). Of each token besides: the last layer norm's input
    (H) and what it divides by (2), and the picture. Attention probabilities are not kept
    (scaled_dot_product_attention). With activation checkpointing each layer keeps its input (H), and one layer
    everything.
    """
    model, training = config.model, config.training
    mlp_size = model.mlp_size or 4 * model.hidden_size
    num_pictures = training.batch_size // training.accumulation
    split = (5 * model.hidden_size + model.num_heads) * part.heads + 2 * mlp_size * part.neurons
    of_layer = 4 * model.hidden_size + 4 + round(split)
    of_layers = model.depth * of_layer
    if training.activation_checkpointing:
        of_layers = model.depth * model.hidden_size + of_layer
    of_picture = model.num_tokens * (of_layers + model.hidden_size + 2) + model.num_channels * model.image_size**2
    return num_pictures * of_picture * (4 if training.precision == "fp32" else 2)


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


def _print(
    config: RunConfig, num_ranks: int, whole: int, needed: Sequence[Requirements], fitting: Sequence[float]
) -> None:
    """Print the table, and where limits are exceeded with activations which shares would fit."""
    model, training, limits = config.model, config.training, config.balance.memory_limits
    ranks_of: dict[tuple[Requirements, float | None], list[int]] = {}
    for rank, needs in enumerate(needed):
        ranks_of.setdefault((needs, limits[rank] if limits is not None else None), []).append(rank)
    alike = len(ranks_of) == 1
    table = Table(
        title=f"{'one of ' if alike else ''}{num_ranks} ranks, {config.host}, {training.precision}, "
        f"batch {training.batch_size} × {model.num_tokens} tokens",
        title_justify="left",
    )
    shown = [needs for needs, _ in ranks_of]
    table.add_column("what")
    for ranks in ranks_of.values():
        table.add_column("size" if alike else _named(ranks), justify="right")
    table.add_row("parameters, whole model", f"{whole:,}")
    table.add_row(
        "parameters, this rank" if alike else "parameters, each rank",
        *(f"{own.parameters:,}" for own in shown),
        end_section=True,
    )
    rows = {
        "weights": "weights",
        "gradients": "gradients",
        "AdamW moments, fp32": "adamw",
        "master weights, fp32": "master_weights",
        "activations, estimated": "activations",
    }
    for label, name in rows.items():
        table.add_row(label, *(_gib(getattr(own, name)) for own in shown))
    table.add_section()
    table.add_row("together", *(_gib(own.total) for own in shown))
    if limits is not None:
        table.add_row("memory_limits", *(_gib(limit) for _, limit in ranks_of if limit is not None))
    table.add_row("host memory while building (whole model, fp32)", _gib(4 * whole))
    console = Console()
    console.print(data_line(config.data.source), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    over = [rank for rank, needs in enumerate(needed) if limits is not None and needs.total > limits[rank]]
    if over:
        console.print(
            f"with activations {_named(over)} would be over the limit (balance.memory_limits) until units move, after "
            f"{2 * config.balance.update_every} steps: begin with balance.shares={[round(one, 2) for one in fitting]}",
            highlight=False,
            soft_wrap=True,
        )
    if config.balance.shares == "auto":
        by = "even ones" if limits is None else "by memory"
        console.print(f"shares are measured when training begins; these are {by}", highlight=False, soft_wrap=True)
    sound = f"balance mode {config.balance.mode}: the configuration is sound"
    console.print(sound, markup=False, highlight=False, soft_wrap=True)


def _named(ranks: Sequence[int]) -> str:
    """Those that need the same: a rank, or several with their runs of numbers as ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = ", ".join(str(own[0]) if len(own) == 1 else f"{own[0]}–{own[-1]}" for own in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _gib(num_bytes: float) -> str:
    """Three decimals: they tell small models apart, and align."""
    return f"{num_bytes / 2**30:,.3f} GiB"
