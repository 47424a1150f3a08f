"""LLaMA-like layers for packed sequences: an embedding, blocks, a head; whole and plain, for others to divide.

Every layer is called ``layer(x, packed)``, with a :class:`~zeroresize.strategy.packed.Packed` micro-batch.

``T`` tokens of a micro-batch, ``D`` hidden size, ``G`` KV groups and ``H`` heads of this rank, ``C`` features
of a head, ``N`` sequences of ``S`` tokens, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.rotary import rotary_waves, rotate
from vit_examples.harness.sections import each_at_least
from zeroresize.layers.segment import Segment
from zeroresize.strategy.packed import Packed
from zeroresize.utils.value_checks import at_least, divides, number

_EPSILON = 1e-5
_INIT_STD = 0.02
#: The feed-forward part's size is rounded up to a multiple of it.
_MLP_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of the model.

    Attributes:
        num_blocks: transformer blocks; there are two layers more, embedding and head.
        num_kv_heads: heads of keys and values, each read by as many query heads; None is ``num_heads``.
        mlp_size: hidden units of the feed-forward part; None is 8/3 of ``hidden_size``, rounded up to a multiple of 16.
        vocabulary: 256 for bytes.
        rotary_base: of the rotary positions' wave lengths.

    Raises:
        ValueError: for sizes below 1, or that do not divide, or heads of an odd size.
    """

    num_blocks: int = 8
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    mlp_size: int | None = None
    vocabulary: int = 256
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        each_at_least("model", self, ("num_blocks", "hidden_size", "num_heads", "num_kv_heads", "vocabulary"), 1)
        number("model.rotary_base", self.rotary_base, least=1.0)
        if self.mlp_size is None:
            size = math.ceil(self.hidden_size * 8 / 3 / _MLP_MULTIPLE) * _MLP_MULTIPLE
            object.__setattr__(self, "mlp_size", size)
        at_least("model.mlp_size", self.mlp_size, 1)
        divides("model.hidden_size", self.hidden_size, "model.num_heads", self.num_heads)
        divides("model.num_heads", self.num_heads, "model.num_kv_heads", self.num_kv_groups)
        if self.head_size % 2:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} over model.num_heads={self.num_heads} are {self.head_size} "
                "features a head: rotary positions need an even number"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_kv_groups(self) -> int:
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def feed_forward_size(self) -> int:
        assert self.mlp_size is not None
        return self.mlp_size


class Embedding(nn.Module):
    """Tokens [T] of int64 to [T, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden_size)
        nn.init.normal_(self.tokens.weight, std=_INIT_STD)

    def forward(self, tokens_T: Tensor, packed: Packed) -> Tensor:
        return self.tokens(tokens_T)


class Attention(nn.Module):
    """Grouped-query attention of [T, D] with rotary positions: each token sees those before it in its own sequence.

    How many heads there are follows from the projections' widths, so any share of the KV groups works, none included.

    Sequences of one length that are neighbours are one call of torch's attention. On a GPU with FlashAttention one call
    for all would serve, with the sequences' starts (``flash_attn_varlen_func``, or torch's ``flex_attention`` with a
    document mask).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size, self.rotary_base = config.head_size, config.rotary_base
        self.heads_per_group = config.num_heads // config.num_kv_groups
        # A KV group after the other, each with its queries, key and value: one product, so one all-reduce of its dx.
        self.qkv = _linear(config.hidden_size, config.num_kv_groups * self._group_size)
        self.out = _linear(config.hidden_size, config.hidden_size, num_blocks=config.num_blocks)

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
        self.gate_up = _linear(config.hidden_size, 2 * config.feed_forward_size)
        self.down = _linear(config.feed_forward_size, config.hidden_size, num_blocks=config.num_blocks)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward part, each behind an RMSNorm and beside a residual connection; [T, D] to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.hidden_size, _EPSILON), Attention(config)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.hidden_size, _EPSILON), FeedForward(config)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), packed)
        return x_TD + self.mlp(self.mlp_norm(x_TD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides: attention by KV groups, the feed-forward part by neurons."""
        group_size = self.attention.heads_per_group * self.attention.head_size
        return [
            Segment(["attention.qkv"], "attention.out", unit_size=group_size, kind="KV groups"),
            Segment(["mlp.gate_up"], "mlp.down", parts=2, kind="neurons"),
        ]


class Head(nn.Module):
    """[T, D] to logits [T, V]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, _EPSILON)
        self.logits = _linear(config.hidden_size, config.vocabulary)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        return self.logits(self.norm(x_TD))


def llama_layers(config: LlamaConfig) -> list[nn.Module]:
    """Embedding, blocks and head, with weights drawn from torch's generator (none on the meta device)."""
    return [Embedding(config), *(Block(config) for _ in range(config.num_blocks)), Head(config)]


def token_loss(logits_TV: Tensor, packed: Packed) -> Tensor:
    """Cross entropy of the targets, summed over the tokens, in float32 at least."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), packed.targets, reduction="sum")


def _linear(in_features: int, out_features: int, num_blocks: int | None = None) -> nn.Linear:
    """Without bias; with ``num_blocks`` its output joins the residual stream of so many blocks."""
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=_INIT_STD / math.sqrt(2 * num_blocks) if num_blocks else _INIT_STD)
    return linear


def _causal_attention(query_THC: Tensor, key_THC: Tensor, value_THC: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, H, C] within each sequence."""
    mixed = []
    for begin, num_sequences, length in _runs(lengths):
        parts_NHSC = (
            tensor_THC[begin : begin + num_sequences * length].unflatten(0, (num_sequences, length)).transpose(1, 2)
            for tensor_THC in (query_THC, key_THC, value_THC)
        )
        mixed_NHSC = F.scaled_dot_product_attention(*parts_NHSC, is_causal=True)
        mixed.append(mixed_NHSC.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where neighbours of one length begin, how many they are, and their length."""
    begin = 0
    for length, run in itertools.groupby(lengths):
        num_sequences = len(list(run))
        yield begin, num_sequences, length
        begin += num_sequences * length
