"""Parts of transformers for padded rows, whole and plain, for others to divide.

Every layer is called ``layer(x, batch)``. ``B`` rows, ``L`` queries and ``K`` keys of a row, ``D`` hidden size, ``H``
heads of this rank, ``C`` features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        if self.mlp_size is None:
            object.__setattr__(self, "mlp_size", 4 * self.hidden_size)
        at_least("model.head_size", self.head_size, 2)
        at_least("model.mlp_size", self.mlp_size, 1)
        if self.features % 2:
            raise ValueError(f"model.head_size={self.head_size}: rotary positions need an even number of features")

    @property
    def features(self) -> int:
        """Return the features of a head."""
        assert self.head_size is not None
        return self.head_size

    @property
    def neurons(self) -> int:
        """Return the hidden units of the feed-forward part."""
        assert self.mlp_size is not None
        return self.mlp_size


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


def attention_segment(name: str, attention: Attention) -> Segment:
    """What tensor parallelism divides of an attention: its heads."""
    columns = [f"{name}.{part}" for part in ("query", "key", "value")]
    return Segment(columns, f"{name}.out", unit_size=attention.head_size, kind="heads")


def mlp_segment(name: str) -> Segment:
    """What tensor parallelism divides of a feed-forward part: its neurons."""
    return Segment([f"{name}.up"], f"{name}.down", kind="neurons")


def norm(config: ModelConfig) -> nn.RMSNorm:
    """The norm before each part of a block."""
    return nn.RMSNorm(config.hidden_size, _EPSILON)


def embedding(config: ModelConfig) -> nn.Embedding:
    """Of tokens."""
    tokens = nn.Embedding(config.vocabulary, config.hidden_size)
    nn.init.normal_(tokens.weight, std=_INIT_STD)
    return tokens


def linear_to_vocabulary(config: ModelConfig) -> nn.Linear:
    """Logits of the hidden state."""
    return _linear(config.hidden_size, config.vocabulary)


def summed_loss(logits_BLV: Tensor, batch: PaddedBatch | PairBatch) -> Tensor:
    """Cross entropy of the targets, summed over those that count, in float32 at least."""
    wide = torch.promote_types(logits_BLV.dtype, torch.float32)
    logits = logits_BLV.to(wide).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum", ignore_index=IGNORED)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=_INIT_STD)
    return linear
