"""What a check of parallel training is judged by: cases with a fault, cases without, and how wrong each of them is.

A case makes, in each rank, a divided model and the undivided one beside it. It is measured without the check: how far
the loss, gradients after one and after two backwards, and the norm of a clipping are from those of the undivided model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

#: Below it two computations are the same but for rounding, by host: norms of transformers compute in float32.
ROUNDING = {"plain": 1e-9, "DTensor": 1e-9, "transformers": 1e-6, "Colossal-AI": 1e-6}
FAULT = 1e-3


@dataclass
class Setting:
    """What a check is given in one rank, and what it is measured against.

    Args:
        model: divided over the group.
        batch: of this rank, as a loss takes it.
        loss: (model, batch) → scalar.
        whole: the undivided model, on every rank.
        kwargs: of the check: reference, optimizer, clip.
        whole_batch, whole_loss: of the undivided model, where they are others.
        parts: in how many parts, each cut by itself, a packed parameter lies; by its name.
        seed: of the default generator before each forward of the divided model; the undivided has 0.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor]
    whole: nn.Module
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    whole_batch: Any = None
    whole_loss: Callable[[Any, Any], torch.Tensor] | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """
    Args:
        host: "plain", "DTensor", "transformers" or "Colossal-AI".
        make: (rank, group) → what it is.
        causes: each of them names the fault rightly; none for a sound case.
        names: parameters and layers that may be named, or the beginnings of their names; "" alone where the fault is
            none of a layer's. At least one finding names one of them, and none names another.
        seen_in: which of the measures differ from the undivided model's.
    """

    name: str
    host: str
    make: Callable[[int, ProcessGroup], Setting]
    causes: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    seen_in: str = "gradient"

    @property
    def is_sound(self) -> bool:
        return not self.causes


def cases_of(host: str) -> tuple[list[Case], Callable[..., Any]]:
    """Return a list of cases, and a decorator that adds functions to it, which are named like their cases."""
    cases: list[Case] = []

    def add(causes: tuple[str, ...] = (), names: tuple[str, ...] = (), seen_in: str = "gradient") -> Callable[..., Any]:
        return lambda make: cases.append(
            Case(make.__name__.replace("_", " "), host, make, frozenset(causes), names, seen_in)
        )

    return cases, add


def change(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Patch the class of one module of a host: a subclass of the same name with other methods."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


def measured(setting: Setting, group: ProcessGroup) -> dict[str, float]:
    """Relative errors against the undivided model: of the loss, of gradients (the worst), of the norm of a clipping."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    whole_batch = setting.batch if setting.whole_batch is None else setting.whole_batch
    right = _backwards(setting.whole, setting.whole_loss or setting.loss, whole_batch, 0)
    seen = _backwards(setting.model, setting.loss, setting.batch, setting.seed, **setting.kwargs)
    errors = {"loss": abs(seen["loss"] / right["loss"] - 1)}
    for measure in ("gradient", "two backwards"):
        # The bias of keys has no gradient but for rounding: a softmax does not see it.
        least, worst = 1e-3 * max(item.norm() for item in right[measure].values()), 0.0
        for name, whole in right[measure].items():
            part = _part(whole, seen[measure].get(name), rank, num_ranks, setting.parts.get(name, 1))
            error = part if name not in seen[measure] else _without_padding(seen[measure][name], part) - part
            worst = max(worst, float(error.norm() / part.norm().clamp_min(least)))
        errors[measure] = worst
    if seen["norm"] is not None:
        squares = sum(gradient.square().sum() for gradient in right["gradient"].values())
        errors["norm"] = abs(seen["norm"] / float(squares) ** 0.5 - 1)
    return errors


def _backwards(model, loss, batch, seed, clip=None, optimizer=None, reference=None) -> dict[str, Any]:
    # Some hosts' optimizers end a backward, and their models say when the last one of a step comes.
    backward = getattr(optimizer, "backward", torch.Tensor.backward)
    result: dict[str, Any] = {"norm": None}
    for measure, num_backwards in (("gradient", 1), ("two backwards", 2)):
        model.zero_grad()
        for number in range(num_backwards):
            is_last = number == num_backwards - 1
            with nullcontext() if is_last else getattr(model, "no_sync", nullcontext)():
                torch.manual_seed(seed)
                value = loss(model, batch)
                backward(value)
        result["loss"] = float(_whole(value.detach()))
        result[measure] = {
            re.sub(r"^(module\.)+", "", name): _whole(item.grad).clone()
            for name, item in model.named_parameters()
            if item.grad is not None
        }
        if clip is not None and measure == "gradient":
            result["norm"] = float(_whole(torch.as_tensor(clip(model))))
    model.zero_grad()
    return result


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(whole: torch.Tensor, seen: torch.Tensor | None, rank: int, num_ranks: int, parts: int) -> torch.Tensor:
    """Of the whole gradient, what this rank sees of it."""
    for dim, size in enumerate(whole.shape):
        if seen is not None and seen.shape[dim] < size:
            return torch.cat([part.chunk(num_ranks, dim)[rank] for part in whole.chunk(parts, dim)], dim)
    return whole


def _without_padding(seen: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Vocabularies may be padded."""
    return seen[tuple(slice(size) for size in part.shape)]
