"""What a run would need, found out on any machine: no GPU, no process group, the model on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vit_examples.config import RunConfig
from vit_examples.data import expand_variables
from vit_examples.harness.dry_run import Needs, show_needs
from vit_examples.model import build_vit, parallel_style
from zeroresize.plan.ownership import (
    COPY_GAIN,
    CopyCosts,
    SegmentWork,
    checked_shares,
    neuron_quantum,
    slices_of,
    unit_counts,
)
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes


def dry_run(config: RunConfig, num_ranks: int) -> list[Needs]:
    """Check ``config`` for ``num_ranks`` ranks and print, on rank 0 if under torchrun, what each of them needs.

    Shares that are to be measured (``"auto"``) are taken to be even. With ``balance.memory_limits`` units are divided
    as training begins with them.
    """
    config.validate_group_size(num_ranks)
    model = build_vit(config.model, num_ranks=num_ranks, seed=0, device="meta")
    shares = _shares_at_start(config, model, num_ranks)
    needs = [_needs(config, model, _Part.of(config, shares, rank)) for rank in range(num_ranks)]
    training, limits = config.training, config.balance.memory_limits
    whole = sum(parameter.numel() for parameter in model.parameters())
    title = f"{config.host}, {training.precision}, batch {training.batch_size} × {config.model.num_tokens} tokens"
    notes = [f"the whole model has {whole:,} parameters", _data_line(config.data.source)]
    over = [rank for rank, one in enumerate(needs) if limits is not None and one.total > limits[rank]]
    if over:
        notes.append(f"with activations ranks {over} would be over their limit (balance.memory_limits) at first")
    if config.balance.shares == "auto":
        notes.append(f"shares are measured when training begins; these are {'even' if limits is None else 'by memory'}")
    notes.append(f"balance mode {config.balance.mode}: the configuration is sound")
    show_needs(title, {f"{num_ranks} ranks": needs}, notes)
    return needs


def _shares_at_start(config: RunConfig, model: nn.Module, num_ranks: int) -> Sequence[float]:
    """By which shares units are divided when training begins; activations are not known then."""
    balance = config.balance
    measured = isinstance(balance.shares, str)
    shares = (1.0,) * num_ranks if measured else checked_shares(balance.shares, num_ranks)
    if balance.memory_limits is None:
        return shares
    without, even = (_needs(config, model, _Part(part, part, 1.0 / num_ranks)) for part in (0.0, 1.0 / num_ranks))
    fixed, whole = (one.total - one.activations for one in (without, even))
    held = [HeldBytes(fixed, whole - fixed)] * num_ranks
    memory = GroupMemory(balance.memory_limits, held, _segments(config, num_ranks))
    shares = memory.at_start if measured else shares
    if (why := memory.why_too_much(shares)) is not None:
        raise ValueError(f"balance.memory_limits, activations not counted: {why}")
    return shares


def _needs(config: RunConfig, model: nn.Module, part: _Part) -> Needs:
    """Of a rank that owns this part."""
    parameters = sum(
        round(parameter.numel() * part.of_parameter(config, name)) for name, parameter in model.named_parameters()
    )
    # Colossal-AI's mixed precision holds 16-bit weights and fp32 masters, whose fp32 gradients replace the 16-bit ones
    # in the step; autocast on plain torch holds fp32 weights only.
    has_masters = config.host == "colossalai" and config.training.precision != "fp32"
    weights, optimizer = parameters * (2 if has_masters else 4), parameters * (12 if has_masters else 8)
    return Needs("", parameters, weights, 4 * parameters, optimizer, activation_bytes(config, part))


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
            segment.loads(unit_counts(checked, segment), held=True)[rank] / len(shares)
            for segment in _segments(config, len(shares))
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
    slices = slices_of(model.num_heads, num_ranks)
    heads = SegmentWork(
        model.num_heads * slices,
        1,
        of_heads,
        block=slices,
        shared=1 / 2,  # keys and values
        slices=slices,
        copies=CopyCosts(any_whole=COPY_GAIN),
    )
    return heads, neurons


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
    of_picture = model.num_tokens * (of_layers + model.hidden_size + 2) + 3 * model.image_size**2
    return num_pictures * of_picture * (4 if training.precision == "fp32" else 2)


def _data_line(source: str) -> str:
    """Whether the data are here, as far as can be said without opening them."""
    try:
        expanded = expand_variables(source)
    except ValueError as error:
        return f"warning: {error}"
    if expanded == "mnist5k" or Path(expanded).expanduser().is_dir():
        return f"data: {expanded}; the pictures were not opened"
    return f"data: no folder {expanded} here, so the name of a data set on the Hugging Face hub; not looked for"
