"""What a check of parallel training is judged by: cases with a fault, and cases without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup


@dataclass
class Setting:
    """What a check is given in one rank: a model that is divided over the group, and ``kwargs`` of the check."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """
    Args:
        make: (rank, group) → what the check is given.
        causes: each of them names the fault rightly; none for a sound case.
        names: parameters and layers that may be named, or the beginnings of their names; "" alone where the fault is
            none of a layer's. At least one finding names one of them, and none names another.
    """

    name: str
    make: Callable[[int, ProcessGroup], Setting]
    causes: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.causes


def cases_of() -> tuple[list[Case], Callable[..., Any]]:
    """Return a list of cases, and a decorator that adds functions to it, which are named like their cases."""
    cases: list[Case] = []

    def add(causes: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> Callable[..., Any]:
        return lambda make: cases.append(Case(make.__name__.replace("_", " "), make, frozenset(causes), names))

    return cases, add


def change(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Patch the class of one module of a host: a subclass of the same name with other methods."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)
