"""The tensors of LLaMA-like models, to plan for sizes that are not there."""

from __future__ import annotations

from dataclasses import dataclass

from zeroresize.plan.layout import TensorSpec, UnitDivision


@dataclass(frozen=True)
class LlamaShape:
    """Describe a LLaMA-like model; attention is divided by KV groups, the feed-forward part by neurons.

    Attributes:
        hidden: size of a token between layers.
        num_kv_heads: of them each serves ``num_heads / num_kv_heads`` heads; 0 for as many as heads.
        feed_forward: neurons.
    """

    num_layers: int
    hidden: int
    num_heads: int
    feed_forward: int
    vocabulary: int = 32000
    num_kv_heads: int = 0

    @property
    def num_groups(self) -> int:
        """Return the number of KV groups."""
        return self.num_kv_heads or self.num_heads


LLAMA_7B = LlamaShape(32, 4096, 32, 11008)
LLAMA_70B = LlamaShape(80, 8192, 64, 28672, num_kv_heads=8)
#: There is no official one: LLaMA-33B's layers and hidden size, with 64 heads, which 16 ranks divide.
LLAMA_32B = LlamaShape(60, 6656, 64, 17920)


def llama_tensors(shape: LlamaShape, itemsize: int = 2) -> list[TensorSpec]:
    """Return all weights, layer by layer.

    As in Megatron-LM the embedding and the head are divided by rows of the vocabulary, and belong to the first and the
    last layer, the last norm, too.

    Args:
        itemsize: bytes of an element, such as 2 of bfloat16.
    """
    hidden, groups = shape.hidden, shape.num_groups
    head = hidden // shape.num_heads
    attention = [("query", hidden // groups), ("key", head), ("value", head)]

    def rows(name: str, layer: int, num_units: int, rows_of_unit: int) -> TensorSpec:
        division = UnitDivision(0, num_units, rows_of_unit)
        return TensorSpec(name, layer, (num_units * rows_of_unit, hidden), itemsize, division)

    def columns(name: str, layer: int, num_units: int, columns_of_unit: int) -> TensorSpec:
        division = UnitDivision(1, num_units, columns_of_unit)
        return TensorSpec(name, layer, (hidden, num_units * columns_of_unit), itemsize, division)

    def norm(name: str, layer: int) -> TensorSpec:
        return TensorSpec(name, layer, (hidden,), itemsize)

    last = shape.num_layers - 1
    tensors = [rows("embedding.weight", 0, shape.vocabulary, 1)]
    for layer in range(shape.num_layers):
        name = f"layers.{layer}"
        tensors += [
            norm(f"{name}.attention_norm.weight", layer),
            *(rows(f"{name}.attention.{part}.weight", layer, groups, own) for part, own in attention),
            columns(f"{name}.attention.output.weight", layer, groups, hidden // groups),
            norm(f"{name}.feed_forward_norm.weight", layer),
            *(rows(f"{name}.feed_forward.{part}.weight", layer, shape.feed_forward, 1) for part in ("gate", "up")),
            columns(f"{name}.feed_forward.down.weight", layer, shape.feed_forward, 1),
        ]
    return [*tensors, norm("norm.weight", last), rows("head.weight", last, shape.vocabulary, 1)]
