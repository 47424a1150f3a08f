"""How many bytes an optimizer keeps for each element of a parameter, also before it has stepped."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from zeroresize.optim.likeness import cases_of, made_like, mark_alike
from zeroresize.optim.optimizers import states_like
from zeroresize.optim.trial import undisturbed

logger = logging.getLogger(__name__)

#: Where no trial is possible: the two moments of Adam, in float32.
_OF_ADAM = 8.0
#: Sizes of a trial's parameter of one dimension, or two.
_SIZES = (64, 64)


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
        optimizer = self._optimizer
        try:
            (case,) = cases_of(optimizer, [tensor])
            shape = _SIZES[: max(min(tensor.dim(), 2), 1)]
            parameter = nn.Parameter(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
            with undisturbed(parameter):
                mark_alike([parameter], case.likes)
                trial = made_like(optimizer, case.settings, [parameter], case.likes, by_default=True)
                parameter.grad = torch.ones_like(parameter)
                trial.step()
        except Exception as error:
            logger.info(
                "memory_limits: %s keeps two numbers of float32 for each parameter, as Adam does, until its first step "
                "tells: %s",
                type(optimizer).__name__,
                str(error) or type(error).__name__,
            )
            return _OF_ADAM
        return float(sum(one.element_size() for one in states_like(trial, parameter)))
