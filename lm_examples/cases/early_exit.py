"""Early exit: tokens whose hidden state hardly changes any more leave, and later blocks do not compute them.

The measure of confidence is CALM's hidden-state saturation (Schuster et al. 2022): the cosine of a token's hidden
states before and behind a block. Where it exceeds a threshold, from the block ``first_exit`` on, the token exits; the
head gets its last hidden state. As in CALM a token that has exited is still attended to, by keys and values that later
blocks compute from that state; it has no queries and no feed-forward part. The loss is of all tokens, so each token
trains the blocks that it went through, and the projections to keys and values of the others.

Between blocks travel the hidden states [B, T, D] and which tokens have exited [B, T].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm_examples.cases.dynamic_case import (
    CaseConfig,
    ChosenTokens,
    DynamicCase,
    EmbeddingBeside,
    attention_products,
    dense_products,
    feed_forward_products,
)
from lm_examples.gpt import Block, Head, ModelConfig
from vit_examples.harness.checked_fields import Count, Natural
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import at_least, number

Cosine = Annotated[float, partial(number, least=-1)]


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(CaseConfig):
    """Which tokens exit.

    Attributes:
        first_exit: number of the first block, from 0, behind which tokens exit; None for the one before the middle.
        threshold: of the cosine, at the end of the schedule; from 1 on nobody exits.
        initial_threshold: at its beginning.
        start, end: steps between which the threshold goes from one to the other, linearly.
        every: steps from one change of the threshold to the next.
    """

    name: str = "early_exit"
    first_exit: Natural | None = None
    threshold: Cosine = 0.98
    initial_threshold: Cosine = 1.0
    start: Natural = 0
    end: Natural = 1000
    every: Count = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("case.end", self.end, self.start)

    def threshold_at(self, step: int) -> float:
        """Behind a step, from 0."""
        if step < self.start:
            return self.initial_threshold
        if step >= self.end:
            return self.threshold
        done = (step - self.start) // self.every * self.every / (self.end - self.start)
        return self.initial_threshold + (self.threshold - self.initial_threshold) * done


@dataclass
class Threshold:
    """In force now, in all blocks."""

    value: float


class ExitBlock(Block):
    """A block that computes the tokens that have not exited.

    Args:
        threshold: None where no token exits behind this block.

    Attributes:
        share_exited: of the tokens of the last forward, those that had exited before.
    """

    def __init__(self, model: ModelConfig, threshold: Threshold | None) -> None:
        super().__init__(model)
        self._model, self._threshold = model, threshold
        self.share_exited = 0.0

    def forward(self, x_BTD: Tensor, exited_BT: Tensor) -> tuple[Tensor, Tensor]:
        self.share_exited = exited_BT.float().mean().item()
        if self.share_exited == 0.0:
            self.work = 1.0
            new_BTD = super().forward(x_BTD)
        else:
            new_BTD = self._only(ChosenTokens(~exited_BT), x_BTD)
        if self._threshold is not None and self._threshold.value < 1.0:
            cosine_BT = F.cosine_similarity(new_BTD.detach(), x_BTD.detach(), dim=-1)
            exited_BT = exited_BT | (cosine_BT > self._threshold.value)
        return new_BTD, exited_BT

    def _only(self, tokens: ChosenTokens, x_BTD: Tensor) -> Tensor:
        (num_sequences, num_queries), (batch, length, size) = tokens.shape, x_BTD.shape
        products = num_sequences * (
            2 * size**2 * (num_queries + length)  # queries and outputs; keys and values
            + feed_forward_products(self._model) * num_queries
            + attention_products(self._model, num_queries * length)
        )
        self.work = products / (batch * dense_products(self._model, length))
        if not num_sequences:
            return x_BTD
        x_SQD = tokens.of(x_BTD)
        x_SQD = x_SQD + self._attention(tokens, x_SQD, x_BTD[tokens.sequences_S])
        return tokens.replaced(x_BTD, x_SQD + self.mlp(self.mlp_norm(x_SQD)))

    def _attention(self, tokens: ChosenTokens, x_SQD: Tensor, x_STD: Tensor) -> Tensor:
        """Of the chosen tokens to all before them."""
        size, qkv = x_SQD.shape[-1], self.attention.qkv
        query = F.linear(self.attention_norm(x_SQD), qkv.weight[:size], qkv.bias[:size])
        key, value = F.linear(self.attention_norm(x_STD), qkv.weight[size:], qkv.bias[size:]).chunk(2, dim=-1)
        heads = [one.unflatten(-1, (self.attention.num_heads, -1)).transpose(1, 2) for one in (query, key, value)]
        is_before_SQT = torch.arange(x_STD.shape[1], device=x_STD.device) <= tokens.places_SQ[..., None]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=is_before_SQT[:, None])
        return self.attention.out(mixed.transpose(1, 2).flatten(-2))


class ExitHead(Head):
    """It asks nobody who has exited."""

    def forward(self, x_BTD: Tensor, exited_BT: Tensor) -> Tensor:
        return super().forward(x_BTD)


class EarlyExit(DynamicCase):
    """Later blocks compute fewer tokens."""

    Config: ClassVar[type[CaseConfig]] = EarlyExitConfig
    shown: ClassVar[Mapping[str, str]] = {"exited_tokens": "share_exited"}

    def __init__(self, model: ModelConfig, options: EarlyExitConfig | None = None) -> None:
        super().__init__(model, options)
        first = self.options.first_exit
        self._first_exit = (model.num_blocks - 1) // 2 if first is None else first
        at_least("case.first_exit", self._first_exit, 0, model.num_blocks - 1)
        self._threshold = Threshold(self.options.threshold_at(0))

    def embedding(self) -> nn.Module:
        return EmbeddingBeside(self.model, lambda x_BTD: x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.bool))

    def block(self, number: int) -> nn.Module:
        return ExitBlock(self.model, self._threshold if number >= self._first_exit else None)

    def head(self) -> nn.Module:
        return ExitHead(self.model)

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        before, self._threshold.value = self._threshold.value, self.options.threshold_at(step)
        return self._threshold.value != before

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        figures = super().figures(pipeline)
        return {**figures, "exit_threshold": self._threshold.value} if figures else {}

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self._threshold.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._threshold.value = state["threshold"]
