"""A GPT-like and a T5-like model for padded rows: whole and plain layers, called ``layer(x, batch)``.

Layers of the T5 before the decoder hand on the sources' states [B, S, D]; the decoder's hand on those and the targets'
states [B, T, D], so any stage may end anywhere. Other than in T5 positions are rotary, since each block has its own and
no table is shared over stages.

``B`` rows, ``L`` queries and ``K`` keys of a row, ``S`` tokens of a source, ``T`` of a target, ``D`` hidden size, ``V``
tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lm_examples.rotary import rotary_waves, rotate
from vit_examples.harness.sections import each_at_least
from zeroresize.layers.segment import Segment
from zeroresize.microbatch.padded import IGNORED, PaddedBatch, PairBatch
from zeroresize.utils.value_checks import at_least, divides

_EPSILON = 1e-5
_INIT_STD = 0.02
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a model.

    Attributes:
        kind: "gpt", decoder-only; "t5", encoder-decoder.
        num_blocks: of a decoder-only model; of an encoder-decoder model those of either half.
        head_size: features of a head; None for ``hidden_size`` / ``num_heads``.
        mlp_size: hidden units of the feed-forward part; None for four times ``hidden_size``.
        vocabulary: 256 for bytes.
    """

    kind: str = "gpt"
    num_blocks: int = 4
    hidden_size: int = 64
    num_heads: int = 4
    head_size: int | None = None
    mlp_size: int | None = None
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.kind not in ("gpt", "t5"):
            raise ValueError(f"model.kind={self.kind!r} is not allowed: there are 'gpt' and 't5'")
        each_at_least("model", self, ("num_blocks", "hidden_size", "num_heads", "vocabulary"), 1)
        if self.head_size is None:
            divides("model.hidden_size", self.hidden_size, "model.num_heads", self.num_heads)
        at_least("model.head_size", self.features if self.head_size is None else self.head_size, 2)
        at_least("model.mlp_size", 1 if self.mlp_size is None else self.mlp_size, 1)
        if self.features % 2:
            raise ValueError(f"model.head_size={self.features}: rotary positions need an even number of features")

    @property
    def features(self) -> int:
        """Of a head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def neurons(self) -> int:
        """Of the feed-forward part."""
        return self.mlp_size or 4 * self.hidden_size


class Attention(nn.Module):
    """Attention of queries from [B, L, D] to keys and values from [B, K, D].

    How many heads there are follows from the projections' widths, so any share of them works. Self-attention has
    rotary positions; they need no parameters that would have to be divided with the heads.

    Attributes:
        recompute: whether scores and what comes of them are computed again in backward instead of being kept.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size, self.recompute = config.features, False
        width = config.num_heads * config.features
        self.query, self.key, self.value = (_linear(config.hidden_size, width) for _ in range(3))
        self.out = _linear(width, config.hidden_size)

    def forward(
        self, x_BLD: Tensor, keys_BKD: Tensor | None = None, mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        other = x_BLD if keys_BKD is None else keys_BKD
        query, key, value = (
            part.unflatten(-1, (part.shape[-1] // self.head_size, self.head_size)).transpose(1, 2)
            for part in (self.query(x_BLD), self.key(other), self.value(other))
        )
        if keys_BKD is None:
            positions = torch.arange(x_BLD.shape[1], device=x_BLD.device)
            waves = rotary_waves(positions, self.head_size, _ROTARY_BASE, query.dtype)
            query, key = rotate(query, *waves), rotate(key, *waves)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(_attend, query, key, value, mask, is_causal, use_reentrant=False)
        else:
            mixed = _attend(query, key, value, mask, is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two products with GELU between, of [..., D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up, self.down = _linear(config.hidden_size, config.neurons), _linear(config.neurons, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Embedding(nn.Module):
    """Tokens [B, L] to [B, L, D]: those of a decoder-only model, or of sources."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.tokens.weight, std=_INIT_STD)

    def forward(self, tokens_BL: Tensor, batch: PaddedBatch | PairBatch) -> Tensor:
        return self.tokens(tokens_BL)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual connection; [B, L, D] to the same."""

    is_causal = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.mlp_norm, self.mlp = _norm(config), FeedForward(config)

    def forward(self, x_BLD: Tensor, batch: Any) -> Tensor:
        mask = None if self.is_causal else _sees_source(batch)
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask=mask, is_causal=self.is_causal)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))

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
        self.norm, self.embedding = _norm(config), Embedding(config)

    def forward(self, x_BSD: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
        return self.norm(x_BSD), self.embedding(batch.tokens, batch)


class DecoderBlock(Block):
    """Causal attention, attention to the source, a feed-forward part; the source's states pass through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross_norm, self.cross = _norm(config), Attention(config)

    def forward(self, x: Any, batch: PairBatch) -> Any:
        source_BSD, x_BTD = x
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), is_causal=True)
        x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD), source_BSD, _sees_source(batch))
        return source_BSD, x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        return [*super().segments(), _attention_segment(self, "cross")]


class Head(nn.Module):
    """[B, L, D], or the targets' states, to logits [B, L, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.logits = _norm(config), _linear(config.hidden_size, config.vocabulary)

    def forward(self, x: Any, batch: PaddedBatch | PairBatch) -> Tensor:
        return self.logits(self.norm(x[1] if isinstance(x, tuple) else x))


def padded_layers(config: ModelConfig) -> list[nn.Module]:
    """All layers of a model, with weights drawn from torch's generator (none on the meta device)."""
    first, last = Embedding(config), Head(config)
    if config.kind == "gpt":
        return [first, *(Block(config) for _ in range(config.num_blocks)), last]
    encoder = [EncoderBlock(config) for _ in range(config.num_blocks)]
    return [first, *encoder, TargetEmbedding(config), *(DecoderBlock(config) for _ in range(config.num_blocks)), last]


def summed_loss(logits_BLV: Tensor, batch: PaddedBatch | PairBatch) -> Tensor:
    """Cross entropy of the targets, summed over those that count, in float32 at least."""
    wide = torch.promote_types(logits_BLV.dtype, torch.float32)
    logits = logits_BLV.to(wide).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum", ignore_index=IGNORED)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def _attention_segment(block: nn.Module, name: str) -> Segment:
    """Its heads."""
    columns = [f"{name}.{part}" for part in ("query", "key", "value")]
    return Segment(columns, f"{name}.out", unit_size=getattr(block, name).head_size, kind="heads")


def _norm(config: ModelConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, _EPSILON)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=_INIT_STD)
    return linear


def _sees_source(batch: PairBatch) -> Tensor:
    """[B, 1, 1, S]: attention must not look at padding."""
    return batch.is_source[:, None, None, :]
