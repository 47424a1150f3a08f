"""How many steps an optimizer has made: ranks that skip different ones train different models, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.optim.optimizers import hook_steps


class OptimizerSteps:
    """Counts an optimizer's steps into this rank's whereabouts, which the ranks compare whenever they meet.

    A loss scaler calls no step where gradients overflow.

    Args:
        optimizer: a torch optimizer, or a host's wrapper of one; of others nothing is counted.
        where: this rank's whereabouts.
    """

    def __init__(self, optimizer: Any, where: Whereabouts) -> None:
        self._where = where
        self._unhook: Callable[[], object] = lambda: None
        with suppress(ValueError):  # a wrapper that hides its optimizer
            self._unhook = hook_steps(optimizer, self._before_step, self._after_step)

    def close(self) -> None:
        """Count no more."""
        self._unhook()

    def _before_step(self) -> None:
        """Only steps that end count."""

    def _after_step(self) -> None:
        self._where.num_optimizer_steps += 1
