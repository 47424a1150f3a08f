"""LLaMA-like layers for packed sequences: an embedding, blocks, a head; whole and plain, for others to divide.

Every layer is called ``layer(x, packed)``, with a :class:`~zeroresize.strategy.packed.Packed` micro-batch.

``T`` tokens of a micro-batch, ``D`` hidden size, ``G`` KV groups and ``H`` heads of this rank, ``C`` features
of a head, ``N`` sequences of ``S`` tokens, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.layers import (
    INIT_STD,
    Embedding,
    Head,
    ResidualBlock,
    TransformerConfig,
    linear,
    rotary_waves,
    rotate,
    summed_loss,
)
from vit_examples.harness.checked_fields import Count
from zeroresize.layers.segment import Segment
from zeroresize.strategy.packed import Packed
from zeroresize.utils.value_checks import divides, number

#: The feed-forward part's size is rounded up to a multiple of it.
_MLP_MULTIPLE = 16
#: Of packed sequences there is no padding.
token_loss = summed_loss


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """Shape of the model.

    Attributes:
        num_kv_heads: heads of keys and values, each read by as many query heads; None is ``num_heads``.
        mlp_size: hidden units of the feed-forward part; None is 8/3 of ``hidden_size``, rounded up to a multiple of 16.
        rotary_base: of the rotary positions' wave lengths.
    """

    num_kv_heads: Count | None = None
    rotary_base: Annotated[float, partial(number, least=1.0)] = 10_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        divides("model.num_heads", self.num_heads, "model.num_kv_heads", self.num_kv_groups)

    @property
    def num_kv_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """Hidden units of the feed-forward part."""
        return self.mlp_size or math.ceil(self.hidden_size * 8 / 3 / _MLP_MULTIPLE) * _MLP_MULTIPLE


class Attention(nn.Module):
    """Grouped-query attention of [T, D] with rotary positions: each token sees those before it in its own sequence.

    How many heads there are follows from the projections' widths, so any share of the KV groups works, none included.

    Sequences of one length that are neighbours are one call of torch's attention. On a GPU with FlashAttention one call
    for all would serve, with the sequences' starts (``flash_attn_varlen_func``, or torch's ``flex_attention`` with a
    document mask).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size, self.rotary_base = config.features, config.rotary_base
        self.heads_per_group = config.num_heads // config.num_kv_groups
        # A KV group after the other, each with its queries, key and value: one product, so one all-reduce of its dx.
        self.qkv = linear(config.hidden_size, config.num_kv_groups * self._group_size)
        self.out = linear(config.hidden_size, config.hidden_size, _residual_std(config))

    @property
    def _group_size(self) -> int:
        return (self.heads_per_group + 2) * self.head_size

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        qkv = self.qkv(x_TD)
        groups = qkv.unflatten(-1, (qkv.shape[-1] // self._group_size, self.heads_per_group + 2, self.head_size))
        turned, value = groups.split((self.heads_per_group + 1, 1), dim=2)
        waves = rotary_waves(packed.positions, self.head_size, self.rotary_base, x_TD.dtype)
        query, key = rotate(turned, *(wave[:, None, None] for wave in waves)).split((self.heads_per_group, 1), dim=2)
        query_THC, key_THC, value_THC = (one.expand_as(query).flatten(1, 2) for one in (query, key, value))
        return self.out(_causal_attention(query_THC, key_THC, value_THC, packed.lengths).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU of [T, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = linear(config.hidden_size, 2 * config.feed_forward_size)
        self.down = linear(config.feed_forward_size, config.hidden_size, _residual_std(config))

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(ResidualBlock):
    """A residual block of [T, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(nn.RMSNorm, config.hidden_size, Attention(config), FeedForward(config))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides: attention by KV groups, the feed-forward part by neurons."""
        group_size = self.attention.heads_per_group * self.attention.head_size
        return [
            Segment(["attention.qkv"], "attention.out", unit_size=group_size, kind="KV groups"),
            Segment(["mlp.gate_up"], "mlp.down", parts=2, kind="neurons"),
        ]


def llama_layers(config: LlamaConfig) -> list[nn.Module]:
    """Embedding, blocks and head, with weights drawn from torch's generator (none on the meta device)."""
    return [Embedding(config), *(Block(config) for _ in range(config.num_blocks)), Head(config)]


def _residual_std(config: LlamaConfig) -> float:
    """Of weights whose product joins the residual stream."""
    return INIT_STD / math.sqrt(2 * config.num_blocks)


def _causal_attention(query_THC: Tensor, key_THC: Tensor, value_THC: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, H, C] within each sequence; neighbours of one length are computed as one."""
    mixed, begin = [], 0
    for length, run in itertools.groupby(lengths):
        num_sequences = len(list(run))
        end = begin + num_sequences * length
        parts_NHSC = (
            tensor_THC[begin:end].unflatten(0, (num_sequences, length)).transpose(1, 2)
            for tensor_THC in (query_THC, key_THC, value_THC)
        )
        mixed_NHSC = F.scaled_dot_product_attention(*parts_NHSC, is_causal=True)
        mixed.append(mixed_NHSC.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(mixed)
