"""pruned_update="freeze": an optimizer step leaves the weights and moments of pruned columns untouched.

Momentum and weight decay act on a gradient of zero, too, so a column that is pruned for an epoch would lose much of its
magnitude. The columns are copied before an optimizer's step and put back after it, so this works for every torch
optimizer and implementation (foreach, fused).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.optim.optimizers import SteppedTensors, hook_steps, require_stepped, states_like, torch_optimizer


class ColumnFreezer:
    """Hooks an optimizer so that its steps leave columns unchanged that the plans of ``layers`` prune.

    A layer with rows that several ranks hold, each with a plan of its own, is stepped as a whole, so that these copies
    stay alike.

    In a parameter's first step the moments of its pruned columns start from zero. State that does not have the
    parameter's shape (a step count, factored moments) is not frozen. During a step it holds copies of the pruned
    columns of the weights and of the state.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear], optimizer: Any) -> None:
        _require_own_weights(layers)
        self._layers = layers
        self._optimizer = torch_optimizer(optimizer)
        weights = {name: layer.weight for name, layer in layers.items()}
        require_stepped(optimizer, weights, "pruned_update='freeze'")
        self._stepped = SteppedTensors(optimizer, weights)
        self._set_aside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._without_state: list[tuple[Tensor, Tensor]] = []
        self._unhook = hook_steps(optimizer, self._before_step, self._after_step)

    def close(self) -> None:
        """Let the optimizer step everything again."""
        self._unhook()
        self._forget()

    @torch.no_grad()
    def _before_step(self) -> None:
        self._forget()  # copies of a step that failed
        for name, tensor in self._stepped.now().items():
            layer = self._layers[name]
            plan = layer.plan
            # Layers in evaluation are never pruned, and what is pruned here of shared rows other ranks compute.
            if plan is None or not layer.training or layer.shared_rows is not None:
                continue
            states = states_like(self._optimizer, tensor)
            if not states:
                self._without_state.append((tensor, plan.pruned))
            for kept in map(local_of, (tensor, *states)):
                self._set_aside.append((kept, plan.pruned, kept.index_select(1, plan.pruned)))

    @torch.no_grad()
    def _after_step(self) -> None:
        for tensor, pruned, values in self._set_aside:
            tensor.index_copy_(1, pruned, values)
        for tensor, pruned in self._without_state:
            for state in states_like(self._optimizer, tensor):
                local_of(state).index_fill_(1, pruned, 0.0)
        self._forget()

    def _forget(self) -> None:
        self._set_aside.clear()
        self._without_state.clear()


def _require_own_weights(layers: Mapping[str, BalancedLinear]) -> None:
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        other = owners.setdefault(id(layer.local_weight), name)
        if other != name:
            raise ValueError(
                f"layers {other} and {name} share their weight: pruned_update='freeze' cannot tell whose pruned "
                "columns to leave alone; use 'optimizer'"
            )
