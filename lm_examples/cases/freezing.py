"""Layer freezing: layers in front that have stopped changing are trained no more and skip backward.

How much a layer changes is its :mod:`~lm_examples.cases.plasticity`.

**Frozen layers** are always the first ones, from the embedding on. Their parameters require no gradients, so autograd
builds no graph for them, they keep no activations, and nothing is sent back to them. Their gradients and optimizer
state are dropped; when they thaw, the optimizer starts anew with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from lm_examples.cases.dynamic_case import CaseConfig, DynamicCase
from lm_examples.cases.plasticity import Watch
from lm_examples.gpt import ModelConfig
from lm_examples.sections import PartAbove0
from vit_examples.harness.checked_fields import Count, Natural
from vit_examples.harness.program import of_all_ranks
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import number


@dataclass(frozen=True, kw_only=True)
class FreezingConfig(CaseConfig):
    """When layers are frozen.

    Attributes:
        start: the first step with a check.
        every: steps from one check to the next.
        window: checks over which a layer's plasticity is averaged.
        tolerance: a layer is calm when this average is at most so large a share of the highest it has had.
        patience: checks in a row in which a layer must be calm.
        keep_active: how many layers at the end are never frozen, the head among them.
        thaw_at_loss: all layers thaw when the mean loss between two checks is this many times its lowest since the
            first of them was frozen; None for never.
    """

    name: str = "freezing"
    start: Natural = 0
    every: Count = 50
    window: Count = 3
    tolerance: PartAbove0 = 0.2
    patience: Count = 2
    keep_active: Count = 1
    thaw_at_loss: Annotated[float, partial(number, above=1)] | None = 1.2


class FreezingRule:
    """The layers that are frozen, always the first ones.

    Args:
        num_layers: of the whole model.

    Attributes:
        num_frozen: layers from the front.
    """

    def __init__(self, num_layers: int, options: FreezingConfig) -> None:
        self._options, self._num_layers = options, num_layers
        self._forget()

    def check(self, plasticity: Sequence[float], loss: float) -> int:
        """Decide anew, and return how many layers are frozen now.

        Args:
            plasticity: [L] since the last check; NaN where it is not known, as of frozen layers.
            loss: mean since the last check; NaN if not known.
        """
        at_loss = self._options.thaw_at_loss
        if self.num_frozen and at_loss is not None and loss >= at_loss * self._lowest_loss:
            self._forget()
            return 0
        for layer, value in enumerate(plasticity):
            if not math.isnan(value):
                self._see(layer, value)
        most = max(self._num_layers - self._options.keep_active, 0)
        while self.num_frozen < most and self._calm[self.num_frozen] >= self._options.patience:
            self.num_frozen += 1
        if self.num_frozen and not loss >= self._lowest_loss:
            self._lowest_loss = loss
        return self.num_frozen

    def state_dict(self) -> dict[str, Any]:
        """What has been seen, as plain values."""
        return {key: value for key, value in vars(self).items() if key != "_options"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, of a model with as many layers."""
        vars(self).update(state)

    def _forget(self) -> None:
        self.num_frozen, self._lowest_loss = 0, math.nan
        self._recent: list[list[float]] = [[] for _ in range(self._num_layers)]
        self._highest, self._calm = [0.0] * self._num_layers, [0] * self._num_layers

    def _see(self, layer: int, value: float) -> None:
        recent = self._recent[layer] = [*self._recent[layer], value][-self._options.window :]
        if len(recent) < self._options.window:
            return
        average = sum(recent) / len(recent)
        self._highest[layer] = max(self._highest[layer], average)
        is_calm = average <= self._options.tolerance * self._highest[layer] and self._highest[layer] > 0.0
        self._calm[layer] = self._calm[layer] + 1 if is_calm else 0


class Freezing(DynamicCase):
    """Layers whose plasticity has become small are frozen, from the front.

    Frozen layers compute their forward, so ``work`` of a block stays 1; they have no backward.
    """

    Config: ClassVar[type[CaseConfig]] = FreezingConfig

    def __init__(self, model: ModelConfig, options: FreezingConfig | None = None) -> None:
        super().__init__(model, options)
        self._rule = FreezingRule(model.num_blocks + 2, self.options)
        self._made: dict[int, nn.Module] = {}

    def embedding(self) -> nn.Module:
        return self._watched(0, super().embedding())

    def block(self, number: int) -> nn.Module:
        return self._watched(number + 1, super().block(number))

    def head(self) -> nn.Module:
        return self._watched(self.model.num_blocks + 1, super().head())

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        for layer in pipeline.layers:
            layer.watch.is_due = False
        if loss is not None:
            last = pipeline.layers[-1].watch
            last.losses = last.losses[0] + loss, last.losses[1] + 1
        if step % self.options.every or step < self.options.start:
            return False
        before = self._rule.num_frozen
        plasticity, mean_loss = self._of_all_stages(pipeline)
        after = self._rule.check(plasticity, mean_loss)
        for place, layer in enumerate(pipeline.layers):
            layer.watch.is_due, layer.watch.probe, layer.watch.losses = place >= after, None, (0.0, 0)
        if after == before:
            return False
        self._freeze(optimizer)
        return True

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        return {"frozen_layers": float(self._rule.num_frozen)}

    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)
        self._freeze(None)

    def _watched(self, number: int, layer: nn.Module) -> nn.Module:
        layer.watch = Watch()
        layer.register_forward_hook(layer.watch.see)
        self._made[number] = layer
        return layer

    def _of_all_stages(self, pipeline: Pipeline) -> tuple[list[float], float]:
        """Every layer's plasticity, and the mean loss; collective."""
        here = [pipeline.layers[place].watch.plasticity(pipeline.layers[place]) for place in pipeline.present]
        of_stages = of_all_ranks((here, pipeline.layers[-1].watch.losses), pipeline.process_group)
        loss_sum, num_losses = of_stages[-1][1]
        plasticity = [value for of_stage, _ in of_stages for value in of_stage]
        return plasticity, loss_sum / num_losses if num_losses else math.nan

    def _freeze(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Make the layers as the rule says, those of other stages, too."""
        for place, layer in self._made.items():
            is_frozen = place < self._rule.num_frozen
            for parameter in layer.parameters():
                parameter.requires_grad_(not is_frozen)
                if is_frozen:
                    parameter.grad = None
                    if optimizer is not None:
                        optimizer.state.pop(parameter, None)
