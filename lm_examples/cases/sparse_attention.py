"""Dynamic sparse attention: tokens attend to those that a hash puts into the same bucket.

How many tiles of the attention matrix are needed follows from the hidden states, so it differs between layers and
changes from batch to batch (DynMo, section 2.4). It matters where attention is a large part of a block: where the
context is long against the hidden size.

After Pagliardini et al. 2023, on which DynMo's sparse attention is built (section 4.2.4). ``G`` heads of all sequences,
``T`` tokens, ``C`` channels of a head, ``W`` tokens of a tile's side, ``P`` computed tiles.

A head's queries and keys are hashed by random directions (the angular LSH of Reformer) and sorted by bucket; within a
bucket they stay in the order of tokens. In sorted order, tiles of W queries and W keys that share no bucket, or whose
keys all come after its queries, are left out; within the others a mask keeps pairs of the same bucket in causal order.
Softmax goes over all tiles of a query. A query without a key in its bucket gets zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lm_examples.cases.dynamic_case import CaseConfig, DynamicCase, attention_products, dense_products
from lm_examples.gpt import Attention, Block, ModelConfig
from vit_examples.harness.checked_fields import Count
from zeroresize.utils.value_checks import divides


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig(CaseConfig):
    """How keys are chosen.

    Attributes:
        num_buckets: of the hash, an even number; 1 for dense attention, computed in tiles.
        block_size: queries and keys of a tile; divides the context.
    """

    name: str = "sparse_attention"
    num_buckets: Count = 16
    block_size: Count = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(f"case.num_buckets={self.num_buckets} is not allowed: an even number, or 1")


class HashAttention(Attention):
    """Causal self-attention of [B, T, D] within buckets.

    Args:
        num_buckets: 1, so that all pairs are computed, or an even number.
        block_size: W; divides the number of tokens.

    Attributes:
        num_pairs: of queries and keys that were computed in the last forward, in one head, masked ones included;
            averaged over heads and summed over sequences.
    """

    rotations: Tensor

    def __init__(self, model: ModelConfig, num_buckets: int, block_size: int) -> None:
        super().__init__(model)
        self._num_buckets, self._block_size = num_buckets, block_size
        self.num_pairs = 0.0
        self.register_buffer("rotations", torch.randn(model.hidden_size // model.num_heads, num_buckets // 2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, heads = x_BTD.shape[0], self.num_heads
        query, key, value = (one.flatten(0, 1) for one in self.heads(x_BTD))
        mixed_GTC, num_tiles = hash_attention(
            query, key, value, self._buckets(query), self._buckets(key), self._block_size
        )
        self.num_pairs = num_tiles * self._block_size**2 / heads
        return self.out(mixed_GTC.unflatten(0, (batch, heads)).transpose(1, 2).flatten(-2))

    def _buckets(self, x_GTC: Tensor) -> Tensor:
        """[G, T], from 0."""
        if self._num_buckets == 1:
            return torch.zeros(x_GTC.shape[:2], dtype=torch.int64, device=x_GTC.device)
        turned = x_GTC.detach() @ self.rotations
        return torch.cat([turned, -turned], dim=-1).argmax(dim=-1)


def hash_attention(
    query_GTC: Tensor, key_GTC: Tensor, value_GTC: Tensor, query_bucket_GT: Tensor, key_bucket_GT: Tensor, width: int
) -> tuple[Tensor, int]:
    """Causal attention between tokens of equal buckets [G, T, C], and the number of tiles that were computed."""
    num_groups, num_tokens, size = query_GTC.shape
    if num_tokens % width:
        raise ValueError(f"{num_tokens} tokens cannot be divided into tiles of {width}")
    queries, keys = _Sorted(query_bucket_GT, width), _Sorted(key_bucket_GT, width)
    group_P, row_P, column_P = _needed_tiles(queries, keys)
    query_PWC = queries.tiles(query_GTC)[group_P, row_P]
    key_PWC, value_PWC = (keys.tiles(one)[group_P, column_P] for one in (key_GTC, value_GTC))
    is_kept_PWW = queries.buckets[group_P, row_P, :, None] == keys.buckets[group_P, column_P, None, :]
    is_kept_PWW &= queries.places[group_P, row_P, :, None] >= keys.places[group_P, column_P, None, :]
    scores_PWW = (query_PWC / math.sqrt(size)) @ key_PWC.transpose(1, 2)
    scores_PWW = scores_PWW.masked_fill(~is_kept_PWW, -math.inf)

    # Softmax over all tiles of a row of tiles.
    num_rows = num_groups * num_tokens // width
    row_P = group_P * (num_tokens // width) + row_P
    most_RW = scores_PWW.new_full((num_rows, width), -math.inf).scatter_reduce(
        0, row_P[:, None].expand(-1, width), scores_PWW.detach().amax(dim=-1), "amax"
    )
    most_RW = most_RW.masked_fill(most_RW == -math.inf, 0.0)  # of queries without keys
    weights_PWW = (scores_PWW - most_RW[row_P, :, None]).exp()
    sums_RW = scores_PWW.new_zeros(num_rows, width).index_add(0, row_P, weights_PWW.sum(dim=-1))
    mixed_RWC = query_PWC.new_zeros(num_rows, width, size).index_add(0, row_P, weights_PWW @ value_PWC)
    mixed_RWC = mixed_RWC / sums_RW.masked_fill(sums_RW == 0.0, 1.0)[..., None]
    return queries.in_order_of_tokens(mixed_RWC.view(query_GTC.shape)), len(group_P)


class _Sorted:
    """Tokens by bucket, in tiles of ``width``.

    Attributes:
        places, buckets: of the tokens [G, T / W, W].
    """

    def __init__(self, buckets_GT: Tensor, width: int) -> None:
        self._width = width
        sorted_GT, self._order_GT = buckets_GT.sort(dim=1, stable=True)
        self.buckets = sorted_GT.unflatten(1, (-1, width))
        self.places = self._order_GT.unflatten(1, (-1, width))

    def tiles(self, x_GTC: Tensor) -> Tensor:
        order = self._order_GT[..., None].expand_as(x_GTC)
        return x_GTC.gather(1, order).unflatten(1, (-1, self._width))

    def in_order_of_tokens(self, x_GTC: Tensor) -> Tensor:
        return torch.zeros_like(x_GTC).scatter(1, self._order_GT[..., None].expand_as(x_GTC), x_GTC)


def _needed_tiles(queries: _Sorted, keys: _Sorted) -> tuple[Tensor, Tensor, Tensor]:
    """Groups, rows and columns [P] of tiles that have a bucket in common, and a key not behind all queries."""
    share_bucket = (queries.buckets[..., 0, None] <= keys.buckets[:, None, :, -1]) & (
        keys.buckets[:, None, :, 0] <= queries.buckets[..., -1, None]
    )
    is_causal = queries.places.amax(dim=-1)[..., None] >= keys.places.amin(dim=-1)[:, None]
    group_P, row_P, column_P = (share_bucket & is_causal).nonzero(as_tuple=True)
    return group_P, row_P, column_P


class SparseAttentionBlock(Block):
    """A block with hashed attention.

    Attributes:
        share_computed: of the pairs of dense causal attention; above 1 where nearly all tiles are needed.
    """

    def __init__(self, model: ModelConfig, options: SparseAttentionConfig) -> None:
        super().__init__(model)
        self._model, self._options = model, options
        self.attention = HashAttention(model, options.num_buckets, options.block_size)
        self.share_computed = 1.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, size = x_BTD.shape
        y_BTD = super().forward(x_BTD)
        dense_pairs = batch * (length * (length + 1) // 2)
        self.share_computed = self.attention.num_pairs / dense_pairs
        dense = batch * dense_products(self._model, length)
        hashes = 2 * batch * length * size * (self._options.num_buckets // 2)
        saved = attention_products(self._model, dense_pairs) * (1.0 - self.share_computed)
        self.work = (dense - saved + hashes) / dense
        return y_BTD


class SparseAttention(DynamicCase):
    """Blocks whose attention skips tiles."""

    Config: ClassVar[type[CaseConfig]] = SparseAttentionConfig
    changes_every_step = True
    shown: ClassVar[Mapping[str, str]] = {"attended_pairs": "share_computed"}

    def __init__(self, model: ModelConfig, options: SparseAttentionConfig | None = None) -> None:
        super().__init__(model, options)
        divides("model.context", model.context, "case.block_size", self.options.block_size)

    def block(self, number: int) -> nn.Module:
        return SparseAttentionBlock(self.model, self.options)
