"""Dynamic sparse attention: tokens attend to those that a hash puts into the same bucket.

What is computed is :mod:`lm_examples.cases.hash_attention`. How many tiles of the attention matrix are needed follows
from the hidden states, so it differs between layers and changes from batch to batch (DynMo, section 2.4). It matters
where attention is a large part of a block: where the context is long against the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.hash_attention import HashAttention
from lm_examples.cases.multiplications import attention_products, dense_products
from lm_examples.gpt import Block, ModelConfig
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import at_least, divides


@dataclass(frozen=True, kw_only=True)
class SparseAttentionOptions:
    """How keys are chosen.

    Attributes:
        num_buckets: of the hash, an even number; 1 for dense attention, computed in tiles.
        block_size: queries and keys of a tile; divides the context.
    """

    num_buckets: int = 16
    block_size: int = 32

    def __post_init__(self) -> None:
        at_least("sparse_attention.num_buckets", self.num_buckets, 1)
        if self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(f"sparse_attention.num_buckets={self.num_buckets} is not allowed: an even number, or 1")
        at_least("sparse_attention.block_size", self.block_size, 1)


class SparseAttentionBlock(Block):
    """A block with hashed attention.

    Attributes:
        share_computed: of the pairs of dense causal attention; above 1 where nearly all tiles are needed.
    """

    def __init__(self, model: ModelConfig, options: SparseAttentionOptions) -> None:
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

    Options: ClassVar[type[Any]] = SparseAttentionOptions
    changes_every_step = True

    def __init__(self, model: ModelConfig, options: SparseAttentionOptions | None = None) -> None:
        super().__init__(model, options)
        divides("model.context", model.context, "sparse_attention.block_size", self.options.block_size)

    def block(self, number: int) -> nn.Module:
        return SparseAttentionBlock(self.model, self.options)

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        present = (pipeline.layers[number] for number in pipeline.present)
        shares = [layer.share_computed for layer in present if isinstance(layer, SparseAttentionBlock)]
        return {"attended_pairs": sum(shares) / len(shares)} if shares else {}
