"""How many bytes an optimizer keeps for each element of a parameter, also before it has stepped."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from zeroresize.optim.optimizers import states_like
from zeroresize.optim.trial import NoTrialError, state_after_step

logger = logging.getLogger(__name__)

#: Where no trial is possible: the two moments of Adam, in float32.
_OF_ADAM = 8.0


class StateBytes:
    """Tells what ``optimizer`` keeps for an element; what it has not stepped yet is tried with one like it.

    Args:
        optimizer: the torch optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of: dict[int, int] = {}
        self._tried: dict[tuple[int, int, torch.dtype], float] = {}

    def of_element(self, tensor: Tensor) -> float:
        """Return the bytes of state of the shape of ``tensor``, which the optimizer steps, for each of its elements."""
        if self._optimizer.state.get(tensor):
            return float(sum(one.element_size() for one in states_like(self._optimizer, tensor)))
        if id(tensor) not in self._group_of:  # at first, or as the optimizer was given more
            groups = enumerate(self._optimizer.param_groups)
            self._group_of = {id(one): number for number, group in groups for one in group["params"]}
        key = self._group_of[id(tensor)], min(tensor.dim(), 2), tensor.dtype
        if key not in self._tried:
            self._tried[key] = self._of_trial(tensor)
        return self._tried[key]

    def _of_trial(self, tensor: Tensor) -> float:
        try:
            state = state_after_step(self._optimizer, tensor)
        except NoTrialError as error:
            logger.info(
                "memory_limits: %s keeps two numbers of float32 for each parameter, as Adam does, until its first step "
                "tells: %s",
                type(self._optimizer).__name__,
                error,
            )
            return _OF_ADAM
        return float(sum(one.element_size() for one in state))
