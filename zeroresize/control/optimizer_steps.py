"""How many steps an optimizer has made: ranks that skip different ones train different models, and nothing fails; nor
does anything where another optimizer steps than the one whose state moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from zeroresize.comm.words import Whereabouts
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.optim.optimizers import hook_steps, stepped_tensors
from zeroresize.utils.torch_private import version_of

#: So many calls of ``balancer.step()``, between which weights changed without a step of the optimizer, are a mistake.
_FEW_STEPS = 2


class OptimizerSteps:
    """Counts an optimizer's steps into this rank's whereabouts, which the ranks compare whenever they meet.

    A loss scaler calls no step where gradients overflow; then weights stay as they are, too.

    Args:
        optimizer: a torch optimizer, or a host's wrapper of one; of others nothing is counted.
        where: this rank's whereabouts.
        layers: balanced layers by name.
    """

    def __init__(self, optimizer: Any, where: Whereabouts, layers: Mapping[str, BalancedLinear]) -> None:
        self._where, self._optimizer = where, optimizer
        self._unhook: Callable[[], object] = lambda: None
        self._layer: BalancedLinear | None = None  # whose weight it steps, which stands for all
        self._num_seen, self._version, self._num_unseen = where.num_optimizer_steps, 0, 0
        with suppress(ValueError):  # a wrapper that hides its optimizer
            self._unhook = hook_steps(optimizer, self._before_step, self._after_step)
            weights = {name: layer.weight for name, layer in layers.items() if layer.weight.requires_grad}
            name = next(iter(stepped_tensors(optimizer, weights)), None)
            self._layer = None if name is None else layers[name]
            self._version = self._version_now()

    def close(self) -> None:
        """Count no more."""
        self._unhook()

    def step_is_called(self) -> None:
        """Note that ``balancer.step()`` is called, and whether weights changed without the optimizer."""
        version = self._version_now()
        if self._num_seen != self._where.num_optimizer_steps:
            self._num_unseen = 0
        elif version != self._version:
            self._num_unseen += 1
        self._num_seen, self._version = self._where.num_optimizer_steps, version

    def why_another_steps(self) -> str | None:
        """Tell why the optimizer seems to have been replaced; None if it does not."""
        if self._num_unseen < _FEW_STEPS:
            return None
        return (
            f"in the last {self._num_unseen} steps weights changed, but not by the {type(self._optimizer).__name__} "
            "that the Balancer was given: close() the Balancer and make a new one with the optimizer that steps"
        )

    def _version_now(self) -> int:
        return 0 if self._layer is None else version_of(self._layer.local_weight)

    def _before_step(self) -> None:
        """Only steps that end count."""

    def _after_step(self) -> None:
        self._where.num_optimizer_steps += 1
