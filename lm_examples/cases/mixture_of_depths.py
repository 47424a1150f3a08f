"""Mixture of depths (Raposo et al. 2024): in every other block a router takes some tokens of a sequence through.

The router gives each token a weight r. The k tokens of a sequence with the largest ones, in their order, make up a
shorter sequence that attention and feed-forward part compute; the others pass by:

    x' = x + 2 σ(r) (block(x) - x) for chosen tokens, x' = x for others.

The factor gives the router a gradient and is 1 at r = 0. Since a token cannot know those behind it, a small predictor
learns from the hidden state alone whether its token is chosen (binary cross entropy, which trains nothing else), and
chooses in evaluation. With ``routing: predictor`` it chooses in training, too: then layers and steps differ in how
many tokens they compute, by what it estimates wrongly, as in DynMo (section 2.6). With ``routing: router`` every routed
block computes k tokens of each sequence, so blocks differ only in whether they are routed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.cases.dynamic_case import AuxiliaryLossCase, CaseConfig, ChosenTokens, PassingBlock, dense_products
from lm_examples.gpt import Block, ModelConfig
from vit_examples.harness.checked_fields import Count, Positive
from zeroresize.utils.value_checks import number


@dataclass(frozen=True, kw_only=True)
class MixtureOfDepthsConfig(CaseConfig):
    """Which tokens are computed where.

    Attributes:
        capacity: share of a sequence's tokens that a routed block takes.
        every: of so many blocks the last one is routed; 1 for all.
        routing: what chooses in training, "router" or "predictor".
        predictor_loss: weight of the predictor's loss.
    """

    name: str = "mixture_of_depths"
    capacity: Annotated[float, partial(number, above=0, most=1)] = 0.125
    every: Count = 2
    routing: Literal["router", "predictor"] = "router"
    predictor_loss: Positive = 0.01


class RoutedBlock(Block):
    """A block that computes chosen tokens.

    Attributes:
        share_chosen: of the tokens of the last forward.
        share_predicted: of its tokens, those of which the predictor told rightly whether the router chooses them.
    """

    def __init__(self, model: ModelConfig, options: MixtureOfDepthsConfig) -> None:
        super().__init__(model)
        self._model, self._options = model, options
        size = model.hidden_size
        self.router = nn.Linear(size, 1, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        hidden = max(size // 4, 1)
        self.predictor = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.share_chosen = self.share_predicted = 1.0

    def forward(self, x_BTD: Tensor, auxiliary_B: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = x_BTD.shape[:2]
        weight_BT = self.router(x_BTD).squeeze(-1)
        predicted_BT = self.predictor(x_BTD.detach()).squeeze(-1)
        most = weight_BT.topk(max(round(self._options.capacity * length), 1), dim=1).indices
        is_top_BT = torch.zeros_like(weight_BT, dtype=torch.bool).scatter(1, most, True)
        error_BT = F.binary_cross_entropy_with_logits(predicted_BT, is_top_BT.to(predicted_BT.dtype), reduction="none")
        auxiliary_B = auxiliary_B + self._options.predictor_loss * error_BT.mean(dim=1)
        self.share_predicted = ((predicted_BT > 0) == is_top_BT).float().mean().item()
        by_router = self.training and self._options.routing == "router"
        tokens = ChosenTokens(is_top_BT if by_router else predicted_BT > 0)
        self.share_chosen = tokens.is_chosen_SQ.sum().item() / (batch * length)
        num_sequences, num_chosen = tokens.shape
        products = num_sequences * dense_products(self._model, num_chosen)
        self.work = products / (batch * dense_products(self._model, length))
        if not num_sequences:
            return x_BTD, auxiliary_B
        x_SQD = tokens.of(x_BTD)
        factor_SQD = 2.0 * tokens.of(weight_BT[..., None]).sigmoid()
        return tokens.replaced(x_BTD, x_SQD + factor_SQD * (super().forward(x_SQD) - x_SQD)), auxiliary_B


class MixtureOfDepths(AuxiliaryLossCase):
    """Some blocks compute some of the tokens."""

    Config: ClassVar[type[CaseConfig]] = MixtureOfDepthsConfig
    changes_every_step = True
    shown: ClassVar[Mapping[str, str]] = {"routed_tokens": "share_chosen", "predicted_rightly": "share_predicted"}

    def block(self, number: int) -> nn.Module:
        is_routed = (number + 1) % self.options.every == 0
        return RoutedBlock(self.model, self.options) if is_routed else PassingBlock(self.model)
