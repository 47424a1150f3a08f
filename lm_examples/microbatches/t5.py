"""A T5-like, encoder-decoder model for padded rows: any stage may end anywhere in either half.

Layers before the decoder hand on the sources' states [B, S, D]; the decoder's hand on those and the targets' states
[B, T, D]. Other than in T5 positions are rotary, since each block has its own and no table is shared over stages.

``B`` rows, ``S`` tokens of a source, ``T`` of a target, ``D`` hidden size, ``V`` tokens of the vocabulary.
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
from zeroresize.microbatch.padded import PairBatch

Pair = tuple[Tensor, Tensor]


class SourceEmbedding(nn.Module):
    """Sources [B, S] to [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = embedding(config)

    def forward(self, sources_BS: Tensor, batch: PairBatch) -> Tensor:
        return self.tokens(sources_BS)


class EncoderBlock(nn.Module):
    """Attention to all of the source and a feed-forward part; [B, S, D] to the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config)
        self.mlp_norm, self.mlp = norm(config), FeedForward(config)

    def forward(self, x_BSD: Tensor, batch: PairBatch) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), mask=_sees_source(batch))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        return [attention_segment("attention", self.attention), mlp_segment("mlp")]


class TargetEmbedding(nn.Module):
    """The encoder's last norm; beside [B, S, D] the targets' embedding [B, T, D] is handed on."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.tokens = norm(config), embedding(config)

    def forward(self, x_BSD: Tensor, batch: PairBatch) -> Pair:
        return self.norm(x_BSD), self.tokens(batch.tokens)


class DecoderBlock(nn.Module):
    """Causal attention, attention to the source, a feed-forward part; the source's states pass through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config)
        self.cross_norm, self.cross = norm(config), Attention(config)
        self.mlp_norm, self.mlp = norm(config), FeedForward(config)

    def forward(self, x: Pair, batch: PairBatch) -> Pair:
        source_BSD, x_BTD = x
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), is_causal=True)
        x_BTD = x_BTD + self.cross(self.cross_norm(x_BTD), source_BSD, _sees_source(batch))
        return source_BSD, x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def segments(self) -> list[Segment]:
        """What tensor parallelism divides."""
        attentions = [attention_segment(name, getattr(self, name)) for name in ("attention", "cross")]
        return [*attentions, mlp_segment("mlp")]


class Head(nn.Module):
    """The targets' states to logits [B, T, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm, self.logits = norm(config), linear_to_vocabulary(config)

    def forward(self, x: Pair, batch: PairBatch) -> Tensor:
        return self.logits(self.norm(x[1]))


def t5_layers(config: ModelConfig) -> list[nn.Module]:
    """Source embedding, encoder blocks, target embedding, decoder blocks and head."""
    encoder = [EncoderBlock(config) for _ in range(config.num_blocks)]
    decoder = [DecoderBlock(config) for _ in range(config.num_blocks)]
    return [SourceEmbedding(config), *encoder, TargetEmbedding(config), *decoder, Head(config)]


def _sees_source(batch: PairBatch) -> Tensor:
    """[B, 1, 1, S]: attention must not look at padding."""
    return batch.is_source[:, None, None, :]
