"""A GPT-like and a T5-like model for padded rows: whole and plain layers, called ``layer(x, batch)``.

Layers of the T5 before the decoder hand on the sources' states [B, S, D]; the decoder's hand on those and the targets'
states [B, T, D], so any stage may end anywhere. Other than in T5 positions are rotary, since each block has its own and
no table is shared over stages.

``B`` rows, ``L`` queries and ``K`` keys of a row, ``S`` tokens of a source, ``T`` of a target, ``D`` hidden size, ``V``
tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lm_examples.layers import (
    Embedding,
    FeedForward,
    Head,
    ResidualBlock,
    TransformerConfig,
    linear,
    norm_of,
    rotary_waves,
    rotate,
)
from vit_examples.harness.checked_fields import Count
from zeroresize.layers.segment import Segment
from zeroresize.microbatch.padded import PairBatch
from zeroresize.utils.value_checks import at_least

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
    """Shape of a model.

    Attributes:
        kind: "gpt", decoder-only; "t5", encoder-decoder.
        num_blocks: of a decoder-only model; of an encoder-decoder model those of either half.
        head_size: features of a head; None for ``hidden_size`` / ``num_heads``.
    """

    kind: Literal["gpt", "t5"] = "gpt"
    num_blocks: Count = 4
    hidden_size: Count = 64
    head_size: Annotated[int, partial(at_least, least=2)] | None = None

    @property
    def features(self) -> int:
        """Of a head."""
        return self.head_size or super().features

    @property
    def num_layers(self) -> int:
        """Blocks of all halves, embeddings and head."""
        return super().num_layers if self.kind == "gpt" else 2 * self.num_blocks + 3


class Attention(nn.Module):
    """Attention of queries from [B, L, D] to keys and values from themselves, or from [B, K, D].

    How many heads there are follows from the projections' widths, so any share of them works. Self-attention has
    rotary positions; they need no parameters that would have to be divided with the heads.

    Attributes:
        recompute: whether scores and what comes of them are computed again in backward instead of being kept.
    """

    def __init__(self, config: ModelConfig, *, is_causal: bool) -> None:
        super().__init__()
        self.head_size, self.is_causal, self.recompute = config.features, is_causal, False
        width = config.num_heads * config.features
        self.query, self.key, self.value = (linear(config.hidden_size, width) for _ in range(3))
        self.out = linear(width, config.hidden_size)

    def forward(self, x_BLD: Tensor, batch: Any, keys_BKD: Tensor | None = None) -> Tensor:
        other = x_BLD if keys_BKD is None else keys_BKD
        query, key, value = (
            part.unflatten(-1, (part.shape[-1] // self.head_size, self.head_size)).transpose(1, 2)
            for part in (self.query(x_BLD), self.key(other), self.value(other))
        )
        if keys_BKD is None:
            positions = torch.arange(x_BLD.shape[1], device=x_BLD.device)
            waves = rotary_waves(positions, self.head_size, _ROTARY_BASE, query.dtype)
            query, key = rotate(query, *waves), rotate(key, *waves)
        mask = None if self.is_causal else batch.is_source[:, None, None, :]  # nobody looks at padding
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(_attend, query, key, value, mask, self.is_causal, use_reentrant=False)
        else:
            mixed = _attend(query, key, value, mask, self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(ResidualBlock):
    """A residual block of [B, L, D]."""

    is_causal = True

    def __init__(self, config: ModelConfig) -> None:
        attention = Attention(config, is_causal=self.is_causal)
        super().__init__(nn.RMSNorm, config.hidden_size, attention, FeedForward(config, linear))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        return [_attention_segment(self, "attention"), Segment(["mlp.up"], "mlp.down", kind="neurons")]


class EncoderBlock(Block):
    """It attends to all of the source."""

    is_causal = False


class TargetEmbedding(nn.Module):
    """The encoder's last norm; beside [B, S, D] the targets' embedding [B, T, D] is handed on."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.embedding = norm_of(config), Embedding(config)

    def forward(self, x_BSD: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
        return self.norm(x_BSD), self.embedding(batch.tokens, batch)


class DecoderBlock(Block):
    """Causal attention, attention to the source, a feed-forward part; the source's states pass through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross_norm, self.cross = norm_of(config), Attention(config, is_causal=False)

    def forward(self, x: tuple[Tensor, Tensor], batch: PairBatch) -> tuple[Tensor, Tensor]:
        source_BSD, x_BTD = x
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), batch)
        x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD), batch, source_BSD)
        return source_BSD, x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        return [*super().segments(), _attention_segment(self, "cross")]


def padded_layers(config: ModelConfig) -> list[nn.Module]:
    """All layers of a model, with weights drawn from torch's generator (none on the meta device)."""
    first, last = Embedding(config), Head(config)
    if config.kind == "gpt":
        return [first, *(Block(config) for _ in range(config.num_blocks)), last]
    encoder = [EncoderBlock(config) for _ in range(config.num_blocks)]
    return [first, *encoder, TargetEmbedding(config), *(DecoderBlock(config) for _ in range(config.num_blocks)), last]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def _attention_segment(block: nn.Module, name: str) -> Segment:
    """Its heads."""
    columns = [f"{name}.{part}" for part in ("query", "key", "value")]
    return Segment(columns, f"{name}.out", unit_size=getattr(block, name).head_size, kind="heads")
