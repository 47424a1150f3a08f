"""How much a layer has changed, by what it keeps of one sequence from one check to the next.

**Plasticity** is Egeria's (Wang et al., EuroSys '23): how much a layer's outputs change, as the similarity-preserving
loss between two of them, mean((G - G')²), where G [T, T] holds the inner products of the tokens' outputs, each row
divided by its norm. Egeria compares with a copy of the whole model from some time ago. Here a layer is compared with
itself: with what it returned for the first sequence of a micro-batch just after the last check. So no rank needs more
than its own layers, and what changes in front of a layer does not count for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Watch(nn.Module):
    """What a layer keeps from one check to the next, and takes along when it moves or is saved.

    Attributes:
        is_due: whether the next forward in training is kept; its last micro-batch is.
        probe: input and output of one sequence; None before the first.
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
            self.probe = inputs[0][:1].detach().clone(), output[:1].detach().clone()

    @torch.no_grad()
    def plasticity(self, layer: nn.Module) -> float:
        """How much the layer has changed since the probe was taken; NaN without one."""
        if self.probe is None:
            return math.nan
        inputs, before = self.probe
        return (_similarity(layer(inputs)[0]) - _similarity(before[0])).square().mean().item()


def _similarity(outputs_TD: Tensor) -> Tensor:
    """Inner products of tokens [T, T], each row divided by its norm."""
    return nn.functional.normalize(outputs_TD @ outputs_TD.t(), dim=1)
