"""What models have in common: their shape, and layers without biases of LLaMA-like models and those of padded rows.

A layer is called with what the one before returned, and with the micro-batch: ``layer(x, batch)``. ``D`` hidden size,
``V`` tokens of the vocabulary, ``C`` features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_examples.harness.checked_fields import Count, Section
from zeroresize.utils.value_checks import divides

INIT_STD = 0.02
_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Section):
    """Shape of a model.

    Attributes:
        num_blocks: transformer blocks; there are two layers more, embedding and head.
        mlp_size: hidden units of the feed-forward part; None is four times ``hidden_size``.
        vocabulary: 256 for bytes.
    """

    section: ClassVar[str] = "model"
    has_rotary_positions: ClassVar[bool] = True
    num_blocks: Count = 8
    hidden_size: Count = 128
    num_heads: Count = 4
    mlp_size: Count | None = None
    vocabulary: Count = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "head_size", None) is None:
            divides("model.hidden_size", self.hidden_size, "model.num_heads", self.num_heads)
        if self.has_rotary_positions and self.features % 2:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} and model.num_heads={self.num_heads} make heads of "
                f"{self.features} features: rotary positions need an even number"
            )

    @property
    def features(self) -> int:
        """Of a head."""
        return self.hidden_size // self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """Hidden units of the feed-forward part."""
        return self.mlp_size or 4 * self.hidden_size

    @property
    def num_layers(self) -> int:
        """Blocks, embedding and head."""
        return self.num_blocks + 2


class Embedding(nn.Module):
    """Tokens [...] of int64 to [..., D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.tokens.weight, std=INIT_STD)

    def forward(self, tokens: Tensor, batch: Any) -> Tensor:
        return self.tokens(tokens)


class ResidualBlock(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual connection; [..., D] to the same."""

    def __init__(self, norm: type[nn.Module], size: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(size, eps=_EPSILON), attention
        self.mlp_norm, self.mlp = norm(size, eps=_EPSILON), mlp

    def forward(self, x: Tensor, *batch: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), *batch)
        return x + self.mlp(self.mlp_norm(x))


class FeedForward(nn.Module):
    """Two products with GELU between, of [..., D]; ``make`` makes their layers."""

    def __init__(self, config: TransformerConfig, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.up = make(config.hidden_size, config.feed_forward_size)
        self.down = make(config.feed_forward_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    """[..., D], the last of several where the layer before returned a tuple, to logits [..., V]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm, self.logits = norm_of(config), linear(config.hidden_size, config.vocabulary)

    def forward(self, x: Any, batch: Any) -> Tensor:
        return self.logits(self.norm(x[-1] if isinstance(x, tuple) else x))


def norm_of(config: TransformerConfig) -> nn.RMSNorm:
    """For hidden states."""
    return nn.RMSNorm(config.hidden_size, _EPSILON)


def linear(in_features: int, out_features: int, std: float = INIT_STD) -> nn.Linear:
    """Without bias."""
    made = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(made.weight, std=std)
    return made


def summed_loss(logits: Tensor, batch: Any) -> Tensor:
    """Cross entropy of the targets, summed over those that are not padding, in float32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide).flatten(0, -2), batch.targets.flatten(), reduction="sum")


def rotary_waves(positions_T: Tensor, features: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, C / 2] of the positions' angles (RoFormer, Eq. 34)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, features, 2, device=positions_T.device, dtype=wide) / features
    angles = positions_T[:, None] * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each head's feature i and the one half a head further turn together; waves are broadcast to [..., C / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
