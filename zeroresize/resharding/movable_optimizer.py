"""Optimizers whose state can follow whole parameters to other ranks: plain ones of torch, with groups alike on all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeroresize.optim.optimizers import require_stepping, torch_optimizer


def require_movable_state(optimizer: object | None, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer | None:
    """Return ``optimizer`` itself, if what it keeps for ``parameters`` can follow them to other ranks.

    Raises:
        ValueError: for a wrapper, which may keep master copies or shards elsewhere, for ZeRO, and for an optimizer that
            does not step all parameters that want gradients.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer) or torch_optimizer(optimizer) is not optimizer:
        kind = "only wraps a" if isinstance(optimizer, torch.optim.Optimizer) else "is no"
        raise ValueError(
            f"{type(optimizer).__name__} {kind} torch.optim.Optimizer: layers cannot move with wrappers of optimizers, "
            "which may keep master copies or shards of the parameters"
        )
    # By its name: importing it takes a while and warns.
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError("layers cannot move with ZeroRedundancyOptimizer: other ranks hold shards of their state")
    require_stepping(optimizer, parameters)
    return optimizer


def groups_of(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Return the number of each parameter's group in the optimizer, by the parameter's ``id``."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}


def settings_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return each parameter group's settings as plain values, comparable between ranks."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        {key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        for group in groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return list(map(_plain, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
