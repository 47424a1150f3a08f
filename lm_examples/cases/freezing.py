"""Layer freezing: layers in front that have stopped changing are trained no more and skip backward.

**Plasticity** is Egeria's (Wang et al., EuroSys '23): how much a layer's outputs change, as the similarity-preserving
loss between two of them, mean((G - G')²), where G [T, T] holds the inner products of the tokens' outputs, each row
divided by its norm. Egeria compares with a reference model, a copy of the whole model from some time ago. Here a layer
is compared with itself: it keeps the first sequence of a micro-batch that it was given just after the last check, and
what it returned; at the check it is run once more on that. So no rank needs more than its own layers, every layer is
watched from the beginning, and what changes in front of a layer does not count for it.

**Frozen layers** are always the first ones, from the embedding on (:mod:`lm_examples.cases.freezing_rule`). Their
parameters require no gradients, so autograd builds no graph for them, they keep no activations, and nothing is sent
back to them. Their gradients and optimizer state are dropped; when they thaw, the optimizer starts anew with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.freezing_rule import FreezingOptions, FreezingRule
from lm_examples.gpt import ModelConfig
from zeroresize.comm.collectives import all_reduce
from zeroresize.pipeline import Pipeline


class Watch(nn.Module):
    """What a layer keeps from one check to the next, and takes along when it moves or is saved.

    Attributes:
        is_due: whether the next forward in training is kept; its last micro-batch is.
        probe: input and output of one sequence, on the CPU; None before the first.
        losses: sum and number of steps' losses since the last check; only the last layer is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_due = False
        self.probe: tuple[Tensor, Tensor] | None = None
        self.losses = 0.0, 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"is_due": self.is_due, "probe": self.probe, "losses": self.losses}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.is_due, self.probe, self.losses = state["is_due"], state["probe"], tuple(state["losses"])

    def see(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook of the layer."""
        if self.is_due and layer.training and torch.is_grad_enabled():
            self.probe = inputs[0][:1].detach().cpu().clone(), output[:1].detach().cpu().clone()

    @torch.no_grad()
    def plasticity(self, layer: nn.Module, device: torch.device) -> float:
        """How much the layer has changed since the probe was taken; NaN without one."""
        if self.probe is None:
            return math.nan
        inputs, before = (one.to(device) for one in self.probe)
        return (_similarity(layer(inputs)[0]) - _similarity(before[0])).square().mean().item()


class Freezing(DynamicCase):
    """Layers whose plasticity has become small are frozen, from the front.

    Frozen layers compute their forward, so ``work`` of a block stays 1; they have no backward.
    """

    Options: ClassVar[type[Any]] = FreezingOptions

    def __init__(self, model: ModelConfig, options: FreezingOptions | None = None) -> None:
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
        *plasticity, loss_sum, num_losses = self._of_all_stages(pipeline)
        mean_loss = loss_sum / num_losses if num_losses else math.nan
        after = self._rule.check(plasticity, float(optimizer.param_groups[0]["lr"]), mean_loss)
        for number, layer in enumerate(pipeline.layers):
            layer.watch.is_due, layer.watch.probe, layer.watch.losses = number >= after, None, (0.0, 0)
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

    def _of_all_stages(self, pipeline: Pipeline) -> list[float]:
        """Every layer's plasticity, and the sum and number of losses; collective."""
        sums = torch.zeros(len(pipeline.layers) + 2, dtype=torch.float64)
        for number in pipeline.present:
            layer = pipeline.layers[number]
            sums[number] = layer.watch.plasticity(layer, pipeline.device)
        if pipeline.present.stop == len(pipeline.layers):
            sums[-2:] = torch.tensor(pipeline.layers[-1].watch.losses, dtype=torch.float64)
        whole = sums.to(pipeline.meet_device)
        all_reduce(whole, pipeline.process_group)
        return whole.tolist()

    def _freeze(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Make the layers as the rule says, those of other stages, too."""
        for number, layer in self._made.items():
            is_frozen = number < self._rule.num_frozen
            for parameter in layer.parameters():
                parameter.requires_grad_(not is_frozen)
                if is_frozen:
                    parameter.grad = None
                    if optimizer is not None:
                        optimizer.state.pop(parameter, None)


def _similarity(outputs_TD: Tensor) -> Tensor:
    """Inner products of tokens [T, T], each row divided by its norm."""
    return nn.functional.normalize(outputs_TD @ outputs_TD.t(), dim=1)
