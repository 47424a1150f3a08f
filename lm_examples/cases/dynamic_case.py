"""What a case of changing work can change in a training run, and what cases share; the base changes nothing.

``B`` sequences of ``T`` tokens; ``S`` sequences with chosen tokens, ``Q`` tokens in the one that has most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lm_examples.gpt import Block, Embedding, Head, ModelConfig, next_token_loss
from vit_examples.harness.checked_fields import Section
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import known_keys, one_of


@dataclass(frozen=True, kw_only=True)
class CaseConfig(Section):
    """What changes the work of layers; a case's own adds its options, which stand beside the name."""

    section: ClassVar[str] = "case"
    name: str = "none"

    @classmethod
    def from_dict(cls, values: Any) -> CaseConfig:
        """Read plain values: which options there are depends on the name."""
        from lm_examples.cases import CASES  # whose files import this

        if not isinstance(values, Mapping):
            raise ValueError(f"case={values!r}: expected a mapping such as {{name: pruning}}")
        name = values.get("name", "none")
        one_of("case.name", name, list(CASES))
        kind = CASES[name].Config
        return kind(**known_keys(f"key of case {name!r}", values, [field.name for field in fields(kind)]))


class DynamicCase:
    """A dense GPT. A case replaces its layers, or changes them between steps.

    Args:
        model: its shape.
        options: of the class :attr:`Config`; None for its defaults.

    Attributes:
        changes_every_step: whether the ``work`` of blocks is another one in every step, as with routing.
        shown: attributes of blocks that :meth:`figures` shows, by their names there.
    """

    Config: ClassVar[type[CaseConfig]] = CaseConfig
    changes_every_step: ClassVar[bool] = False
    shown: ClassVar[Mapping[str, str]] = {}

    def __init__(self, model: ModelConfig, options: Any = None) -> None:
        self.model = model
        self.options: Any = self.Config() if options is None else options

    def embedding(self) -> nn.Module:
        """Tokens [B, T] to what the blocks take: [B, T, D], or a tuple that begins with it."""
        return Embedding(self.model)

    def block(self, number: int) -> nn.Module:
        """The block ``number``, from 0; it takes and returns what the others do, and has an attribute ``work``."""
        return Block(self.model)

    def head(self) -> nn.Module:
        """What the blocks return to what :meth:`loss` takes."""
        return Head(self.model)

    def loss(self, outputs: Any, tokens_BT: Tensor) -> Tensor:
        """Of one micro-batch, averaged over its tokens."""
        return next_token_loss(outputs, tokens_BT)

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        """Change the layers behind the optimizer's step ``step``, from 1; collective.

        Layers are ``pipeline.layers``, of which those in ``pipeline.present`` are here.

        Args:
            loss: of the step, on the last stage; None on the others.

        Returns:
            Whether the work of layers has changed for more than the next step, the same on every rank.
        """
        return False

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        """What to show of the present layers, by name; averaged over stages."""
        present = [pipeline.layers[number] for number in pipeline.present]
        shown = self.shown.items()
        values = {name: [getattr(each, key) for each in present if hasattr(each, key)] for name, key in shown}
        return {name: statistics.fmean(of_blocks) for name, of_blocks in values.items() if of_blocks}

    def state_dict(self) -> dict[str, Any]:
        """What the case must know to go on, the same on every rank; plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, before the first step; layers have been loaded already."""


# Multiplications of a dense block, against which ``work`` is counted. Norms, GELU and softmax do not count.


def feed_forward_products(model: ModelConfig) -> int:
    """Of the feed-forward part, for one token."""
    return 2 * model.hidden_size * model.feed_forward_size


def attention_products(model: ModelConfig, num_pairs: int) -> int:
    """Of attention itself: scores and mixed values of so many pairs of a query and a key, in all heads."""
    return 2 * model.hidden_size * num_pairs


def dense_products(model: ModelConfig, num_tokens: int) -> int:
    """Of a dense block, for one sequence of ``num_tokens``; each attends to itself and those before."""
    of_linear = num_tokens * (4 * model.hidden_size**2 + feed_forward_products(model))
    return of_linear + attention_products(model, num_tokens * (num_tokens + 1) // 2)


class ChosenTokens:
    """Where chosen tokens are, in their order, the shorter sequences padded at the end: only they are computed.

    Args:
        chosen_BT: of bool.

    Attributes:
        sequences_S: the numbers of the sequences with any.
        places_SQ: in their sequence; behind the chosen ones those of other tokens, as padding.
        is_chosen_SQ: False for padding.
        shape: [S, Q], padding included; [0, 0] where none is chosen.
    """

    def __init__(self, chosen_BT: Tensor) -> None:
        self._length = chosen_BT.shape[1]
        self.sequences_S = chosen_BT.any(dim=1).nonzero().flatten()
        chosen_ST = chosen_BT[self.sequences_S]
        counts_S = chosen_ST.sum(dim=1)
        most = int(counts_S.max()) if len(counts_S) else 0
        self.places_SQ = chosen_ST.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        self.is_chosen_SQ = torch.arange(most, device=chosen_BT.device) < counts_S[:, None]
        self.shape = (len(counts_S), most)

    def of(self, x_BTD: Tensor) -> Tensor:
        """The chosen tokens [S, Q, D], and padding."""
        places = self.places_SQ[..., None].expand(-1, -1, x_BTD.shape[-1])
        return x_BTD[self.sequences_S].gather(1, places)

    def replaced(self, x_BTD: Tensor, new_SQD: Tensor) -> Tensor:
        """``x_BTD`` with other values for the chosen tokens, those of padding unused."""
        flat = self.sequences_S[:, None] * self._length + self.places_SQ
        chosen = self.is_chosen_SQ
        return x_BTD.flatten(0, 1).index_copy(0, flat[chosen], new_SQD[chosen]).view_as(x_BTD)


# Something travels between layers beside the hidden states: (x [B, T, D], beside).


class EmbeddingBeside(Embedding):
    """Makes of its hidden states what travels beside them at first."""

    def __init__(self, model: ModelConfig, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model)
        self._beside = beside

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = super().forward(tokens_BT)
        return x_BTD, self._beside(x_BTD)


class PassingBlock(Block):
    """A dense block, which changes nothing beside the hidden states."""

    def forward(self, x_BTD: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BTD), beside


class PassingHead(Head):
    """To logits [B, T, V], and what travelled beside the hidden states."""

    def forward(self, x_BTD: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BTD), beside


class AuxiliaryLossCase(DynamicCase):
    """Blocks add auxiliary losses [B], already weighted, to that of the next tokens."""

    def embedding(self) -> nn.Module:
        return EmbeddingBeside(self.model, lambda x_BTD: x_BTD.new_zeros(len(x_BTD)))

    def head(self) -> nn.Module:
        return PassingHead(self.model)

    def loss(self, outputs: Any, tokens_BT: Tensor) -> Tensor:
        logits_BTV, auxiliary_B = outputs
        return next_token_loss(logits_BTV, tokens_BT) + auxiliary_B.mean()
