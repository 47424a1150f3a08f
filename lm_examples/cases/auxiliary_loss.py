"""A loss of the blocks' own on its way to the last stage: between layers it travels beside the hidden states.

Layers hand on (x [B, T, D], auxiliary [B]). Blocks add to the second, already weighted; the head hands it to the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.gpt import Block, Embedding, Head, next_token_loss


class AuxiliaryEmbedding(Embedding):
    """There is no auxiliary loss yet."""

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = super().forward(tokens_BT)
        return x_BTD, x_BTD.new_zeros(x_BTD.shape[0])


class PassingBlock(Block):
    """A dense block without an auxiliary loss."""

    def forward(self, x_BTD: Tensor, auxiliary_B: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BTD), auxiliary_B


class AuxiliaryHead(Head):
    """To logits [B, T, V] and the auxiliary loss [B]."""

    def forward(self, x_BTD: Tensor, auxiliary_B: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BTD), auxiliary_B


class AuxiliaryLossCase(DynamicCase):
    """Blocks whose auxiliary losses are added to that of the next tokens."""

    def embedding(self) -> nn.Module:
        return AuxiliaryEmbedding(self.model)

    def block(self, number: int) -> nn.Module:
        return PassingBlock(self.model)

    def head(self) -> nn.Module:
        return AuxiliaryHead(self.model)

    def loss(self, outputs: Any, tokens_BT: Tensor) -> Tensor:
        logits_BTV, auxiliary_B = outputs
        return next_token_loss(logits_BTV, tokens_BT) + auxiliary_B.mean()
