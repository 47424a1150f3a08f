"""A GPT-like, decoder-only model for padded rows: an embedding, blocks, a head.

``B`` rows, ``L`` tokens, ``D`` hidden size, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from lm_examples.microbatches.blocks import (
    Attention,
    FeedForward,
    ModelConfig,
    attention_segment,
    embedding,
    linear_to_vocabulary,
    mlp_segment,
    norm,
)
from zeroresize.layers.segment import Segment
from zeroresize.microbatch.padded import PaddedBatch


class Embedding(nn.Module):
    """Tokens [B, L] to [B, L, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = embedding(config)

    def forward(self, tokens_BL: Tensor, batch: PaddedBatch) -> Tensor:
        return self.tokens(tokens_BL)


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a norm and beside a residual connection; [B, L, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config)
        self.mlp_norm, self.mlp = norm(config), FeedForward(config)

    def forward(self, x_BLD: Tensor, batch: PaddedBatch) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), is_causal=True)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        return [attention_segment("attention", self.attention), mlp_segment("mlp")]


class Head(nn.Module):
    """[B, L, D] to logits [B, L, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.logits = norm(config), linear_to_vocabulary(config)

    def forward(self, x_BLD: Tensor, batch: PaddedBatch) -> Tensor:
        return self.logits(self.norm(x_BLD))


def gpt_layers(config: ModelConfig) -> list[nn.Module]:
    """Embedding, blocks and head."""
    return [Embedding(config), *(Block(config) for _ in range(config.num_blocks)), Head(config)]
