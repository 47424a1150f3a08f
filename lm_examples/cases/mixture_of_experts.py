"""Mixture of experts: each token's feed-forward part is computed by the few experts that a router chooses for it.

Routing is Mixtral's: softmax over the experts, the ``top_k`` largest, their weights divided by their sum. With
``balance_loss`` the auxiliary loss of Mixtral (of Switch Transformer) is added, num_experts Σ_e f_e P_e, averaged over
the blocks, where f_e is how many of a token's choices fall on expert e and P_e its mean probability, both over the
tokens of a micro-batch.

**Where the imbalance between layers comes from.** Experts are computed side by side, by one batched product of as many
rows for each expert as the busiest one has, as devices with one expert each would be that wait for each other. So a
layer takes as long as its busiest expert, and routers of different layers, trained apart, are uneven in different ways
that change with every batch. All experts of a layer are on the stage's one device here: it computes the padding of the
others, while in the paper their devices idle. (One after another without padding, experts would compute equally many
tokens in all layers, however uneven they are, and there would be nothing to balance but launch times.) A capacity
factor bounds the rows: what exceeds it is dropped, in the order of tokens, and such a token passes by that expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.cases.dynamic_case import AuxiliaryLossCase, CaseConfig, dense_products, feed_forward_products
from lm_examples.gpt import Block, ModelConfig
from lm_examples.layers import FeedForward
from vit_examples.harness.checked_fields import Count, NonNegative, Positive
from zeroresize.utils.value_checks import at_least


@dataclass(frozen=True, kw_only=True)
class MixtureOfExpertsConfig(CaseConfig):
    """Experts and their routing.

    Attributes:
        num_experts: in each block.
        top_k: experts for each token.
        capacity_factor: an expert takes at most this many times the tokens that it had if all were alike; None for
            any number.
        balance_loss: weight of the auxiliary loss; 0 for none.
    """

    name: str = "mixture_of_experts"
    num_experts: Count = 8
    top_k: Count = 2
    capacity_factor: Positive | None = None
    balance_loss: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("case.top_k", self.top_k, 1, self.num_experts)


class Experts(nn.Module):
    """``E`` feed-forward parts of hidden size ``D`` and ``M`` units, and the router; ``N`` tokens.

    Attributes:
        num_rows: that were computed for each expert in the last forward.
        imbalance: tokens of its busiest expert, dropped ones included, over their mean.
        share_dropped: of the tokens' choices.
    """

    def __init__(self, model: ModelConfig, options: MixtureOfExpertsConfig) -> None:
        super().__init__()
        self._options = options
        experts = [FeedForward(model, nn.Linear) for _ in range(options.num_experts)]
        self.router = nn.Linear(model.hidden_size, options.num_experts, bias=False)
        self.up_EDM = nn.Parameter(torch.stack([one.up.weight.detach().t() for one in experts]))
        self.up_bias_EM = nn.Parameter(torch.stack([one.up.bias.detach() for one in experts]))
        self.down_EMD = nn.Parameter(torch.stack([one.down.weight.detach().t() for one in experts]))
        self.down_bias_ED = nn.Parameter(torch.stack([one.down.bias.detach() for one in experts]))
        self.num_rows, self.imbalance, self.share_dropped = 0, 1.0, 0.0

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' outputs [N, D], and the auxiliary loss, a scalar."""
        num_experts, top_k = self._options.num_experts, self._options.top_k
        probability_NE = self.router(x_ND).softmax(dim=-1)
        weight, expert = probability_NE.topk(top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)

        # Choices by expert, each expert's in the order of tokens.
        order = expert.flatten().argsort(stable=True)
        expert, token, weight = expert.flatten()[order], order // top_k, weight.flatten()[order]
        counts_E = expert.bincount(minlength=num_experts)
        row = torch.arange(len(order), device=x_ND.device) - (counts_E.cumsum(0) - counts_E)[expert]
        busiest, num_choices = int(counts_E.max()), len(order)
        self.num_rows = min(busiest, self._capacity(num_choices))
        self.imbalance = busiest * num_experts / num_choices
        is_taken = row < self.num_rows
        expert, token, weight, row = (one[is_taken] for one in (expert, token, weight, row))
        self.share_dropped = 1.0 - len(row) / num_choices

        place = expert * self.num_rows + row
        x_ERD = x_ND.new_zeros(num_experts * self.num_rows, x_ND.shape[1]).index_copy(0, place, x_ND[token])
        inner = torch.baddbmm(self.up_bias_EM[:, None], x_ERD.unflatten(0, (num_experts, -1)), self.up_EDM)
        y_ERD = torch.baddbmm(self.down_bias_ED[:, None], F.gelu(inner), self.down_EMD).flatten(0, 1)
        y_ND = torch.zeros_like(x_ND).index_add(0, token, weight[:, None] * y_ERD[place])
        share_E = counts_E.to(probability_NE.dtype) / len(x_ND)
        return y_ND, num_experts * (share_E * probability_NE.mean(dim=0)).sum()

    def _capacity(self, num_choices: int) -> int:
        factor = self._options.capacity_factor
        return num_choices if factor is None else math.ceil(factor * num_choices / self._options.num_experts)


class ExpertsBlock(Block):
    """A block with experts for its feed-forward part; its ``work`` counts the rows that pad experts, too.

    Attributes:
        imbalance, share_dropped: of its experts.
    """

    imbalance, share_dropped = 1.0, 0.0

    def __init__(self, model: ModelConfig, options: MixtureOfExpertsConfig) -> None:
        super().__init__(model)
        self._model, self._options = model, options
        self.mlp = Experts(model, options)

    def forward(self, x_BTD: Tensor, auxiliary_B: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, size = x_BTD.shape
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        y_ND, balance = self.mlp(self.mlp_norm(x_BTD).flatten(0, 1))
        dense, num_experts = batch * dense_products(self._model, length), self._options.num_experts
        more_rows = num_experts * self.mlp.num_rows - batch * length
        router = batch * length * size * num_experts
        self.work = (dense + more_rows * feed_forward_products(self._model) + router) / dense
        self.imbalance, self.share_dropped = self.mlp.imbalance, self.mlp.share_dropped
        weight = self._options.balance_loss / self._model.num_blocks
        return x_BTD + y_ND.view_as(x_BTD), auxiliary_B + weight * balance


class MixtureOfExperts(AuxiliaryLossCase):
    """Blocks whose tokens are unevenly routed to experts."""

    Config: ClassVar[type[CaseConfig]] = MixtureOfExpertsConfig
    changes_every_step = True
    shown: ClassVar[Mapping[str, str]] = {"expert_imbalance": "imbalance", "dropped_tokens": "share_dropped"}

    def block(self, number: int) -> nn.Module:
        return ExpertsBlock(self.model, self.options)
