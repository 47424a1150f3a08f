"""A small GPT as a list of layers for a pipeline: an embedding, pre-norm blocks, a head.

``B`` sequences, ``T`` tokens each, ``D`` hidden size, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.layers import INIT_STD, FeedForward, ResidualBlock, TransformerConfig
from vit_examples.harness.checked_fields import Count


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
    """Shape of the model.

    Attributes:
        context: tokens of a sequence.
    """

    has_rotary_positions: ClassVar[bool] = False
    context: Count = 128


class Embedding(nn.Module):
    """Tokens [B, T] of int64 to [B, T, D]: token and position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        self.positions = nn.Embedding(config.context, config.hidden_size)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=INIT_STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.tokens(tokens_BT) + self.positions(positions_T)


class Attention(nn.Module):
    """Causal self-attention of [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, heads, T, D / heads]."""
        parts = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)
        query, key, value = parts.unbind()
        return query, key, value

    def forward(self, x_BTD: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x_BTD), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(ResidualBlock):
    """A residual block of [B, T, D].

    Attributes:
        work: what the last forward computed, as a share of a dense block's multiplications; a dense block's is 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(nn.LayerNorm, config.hidden_size, Attention(config), FeedForward(config, nn.Linear))
        self.work = 1.0


class Head(nn.Module):
    """[B, T, D] to logits [B, T, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.vocabulary)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.logits(self.norm(x_BTD))


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Mean cross entropy of the following tokens, which the caller has shifted."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())
