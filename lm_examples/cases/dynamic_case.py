"""What a case of changing work can change in a training run; the base changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lm_examples.gpt import Block, Embedding, Head, ModelConfig, next_token_loss
from zeroresize.pipeline import Pipeline


@dataclass(frozen=True)
class NoOptions:
    """A dense GPT has none."""


class DynamicCase:
    """A dense GPT. A case replaces its layers, or changes them between steps.

    Args:
        model: its shape.
        options: of the class :attr:`Options`; None for its defaults.

    Attributes:
        changes_every_step: whether the ``work`` of blocks is another one in every step, as with routing.
    """

    Options: ClassVar[type[Any]] = NoOptions
    changes_every_step: ClassVar[bool] = False

    def __init__(self, model: ModelConfig, options: Any = None) -> None:
        self.model = model
        self.options = self.Options() if options is None else options

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
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the case must know to go on, the same on every rank; plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, before the first step; layers have been loaded already."""
