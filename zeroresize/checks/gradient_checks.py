"""Whether a backward gives the derivative of its own forward: measured by differences of losses, whatever the host is.

``θ`` are the parameters of all ranks, ``v`` a direction in them: the same on every rank for what is replicated, drawn
on each rank for shards. Σ ⟨gradient, v⟩, with replicated gradients counted once, must be
(L(θ + h·v) − L(θ − h·v)) / 2h.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize.checks.apart import Apart
from zeroresize.checks.divided import Part
from zeroresize.checks.recording import Numbers, are_alike, numbers_in
from zeroresize.layers.local_parts import local_of
from zeroresize.utils.torch_private import is_dtensor

#: Parameters whose derivatives are measured one by one, where their sum is wrong.
MOST_MEASURED = 200
#: Directions in all parameters at once.
_NUM_DIRECTIONS = 2


@dataclass(frozen=True)
class JudgedGradient:
    """A parameter's gradient beside the measured derivative.

    Attributes:
        products: ⟨gradient, v⟩ on every rank.
        measured: in the same direction.
        tolerance, noise: what it may be off by, as a share and in itself.
    """

    part: Part
    is_alike: bool
    has_gradient: bool
    products: Sequence[float]
    measured: float
    tolerance: float
    noise: float

    @property
    def total(self) -> float:
        return sum(self.products)

    @property
    def gradient(self) -> float:
        """Of the undivided parameter, if it is right."""
        return self.total if self.part.is_shard else self.total / len(self.products)

    def is_measured(self, gradient: float) -> bool:
        """Tell whether a derivative is the measured one."""
        return abs(gradient - self.measured) <= self.tolerance * max(abs(gradient), abs(self.measured)) + self.noise


class GradientCheck:
    """Compares gradients with measured derivatives, for as long as the model computes apart.

    Args:
        parts: of all parameters that need a gradient.
        gradients: of the copies, by name.
        tolerance: of activations that are alike.
    """

    def __init__(self, apart: Apart, parts: Sequence[Part], gradients: Mapping[str, Tensor], tolerance: float) -> None:
        self._apart, self._parts, self._ranks, self._tolerance = apart, parts, apart.ranks, tolerance
        self._gradients = {part.name: gradient_of(part, gradients.get(part.name)) for part in parts}
        numbers = {name: numbers_in(one) for name, one in self._gradients.items() if one is not None}
        self._of_ranks: list[dict[str, Numbers]] = self._ranks.share(numbers)
        norms = [row[-1] for of_rank in self._of_ranks for rows in of_rank.values() for row in rows]
        #: Below it a gradient is only rounding, as that of a bias of keys.
        self._least = tolerance * max(norms, default=0.0)
        modules: list[Any] = [one for one in apart.inner.modules() if hasattr(one, "num_embeddings")]
        padded = {id(one.weight): one.padding_idx for one in modules if one.padding_idx is not None}
        rows = self._ranks.share([len(part.local) if id(part.tensor) in padded else 0 for part in parts])
        #: Of embeddings the row of padding, which gets no gradient.
        self._padding = {
            part.name: padded[id(part.tensor)]
            - part.is_shard * sum(of_rank[at] for of_rank in rows[: self._ranks.rank])
            for at, part in enumerate(parts)
            if id(part.tensor) in padded
        }
        #: The cube root of what is rounding balances that against the curvature of the loss.
        self._step = torch.finfo(apart.dtype).eps ** (1 / 3)

    def run(self) -> list[JudgedGradient]:
        """Return the judged gradients, empty where all are right."""
        is_right = all(self._is_alike(part) for part in self._parts if not part.is_shard)
        for number in range(_NUM_DIRECTIONS if is_right else 0):
            directions = {part.name: self._direction(part, number) for part in self._parts}
            products = [self._products(part, directions[part.name]) for part in self._parts]
            coarse, fine = (self._derivative(directions, scale * self._step) for scale in (2.0, 1.0))
            expected = sum(
                sum(row) if part.is_shard else row[0] for part, row in zip(self._parts, products, strict=True)
            )
            error = 10.0 * abs(coarse - fine) + self._noise() + 1e-6 * max(abs(expected), abs(fine))
            is_right = is_right and abs(expected - fine) <= error
        is_right = is_right and all(self._has_gradient(part) for part in self._parts)
        return [] if is_right else [self._judge(part) for part in self._parts[:MOST_MEASURED]]

    def _judge(self, part: Part) -> JudgedGradient:
        v = self._direction(part, 7)
        gradient = self._gradients[part.name]
        local = torch.zeros_like(part.local) if gradient is None else gradient
        along = local if part.is_shard else self._ranks.sum(local)
        if float(along.norm()):
            v = self._unpadded(part, v + along * (v.norm() / along.norm()))
        v = v * (max(1.0, float(part.local.norm())) / v.norm().clamp_min(1e-30))
        measured = self._derivative({part.name: v}, self._step)
        products = self._products(part, v)
        is_alike, has_gradient = self._is_alike(part), self._has_gradient(part)
        return JudgedGradient(part, is_alike, has_gradient, products, measured, 50.0 * self._step, self._noise())

    def _noise(self) -> float:
        """Of a derivative: what rounding of the losses makes of it."""
        return 100.0 * torch.finfo(self._apart.dtype).eps * max(1.0, abs(self._apart.last_value)) / self._step

    def _has_gradient(self, part: Part) -> bool:
        return any(part.name in of_rank for of_rank in self._of_ranks)

    def _is_alike(self, part: Part) -> bool:
        rows = [of_rank.get(part.name, []) for of_rank in self._of_ranks]
        is_rounding = all(row and row[0][-1] < self._least for row in rows)
        return part.is_shard or is_rounding or all(are_alike(row, rows[0], self._tolerance) for row in rows)

    def _direction(self, part: Part, number: int) -> Tensor:
        """Draw a direction as large as the parameter itself is."""
        seed = zlib.crc32(f"{part.name} {number} {self._ranks.rank if part.is_shard else ''}".encode())
        local = part.local
        drawn = torch.randn(local.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        size = float(local.norm()) / max(local.numel(), 1) ** 0.5
        return self._unpadded(part, (drawn * (size or 0.1)).to(local))

    def _unpadded(self, part: Part, v: Tensor) -> Tensor:
        if 0 <= self._padding.get(part.name, -1) < len(v):
            v[self._padding[part.name]] = 0.0
        return v

    def _products(self, part: Part, v: Tensor) -> list[float]:
        gradient = self._gradients[part.name]
        return self._ranks.share(0.0 if gradient is None else float((gradient.double() * v.double()).sum()))

    def _derivative(self, directions: Mapping[str, Tensor], step: float) -> float:
        values = []
        for sign in (1.0, -1.0):
            with self._moved(directions, sign * step):
                values.append(self._apart.value())
        return (values[0] - values[1]) / (2.0 * step)

    @contextmanager
    def _moved(self, directions: Mapping[str, Tensor], step: float) -> Iterator[None]:
        moved = [part for part in self._parts if part.name in directions]
        were = [part.local.clone() for part in moved]
        try:
            for part in moved:
                part.local.add_(directions[part.name], alpha=step)
            yield
        finally:
            for part, was in zip(moved, were, strict=True):
                part.local.copy_(was)


def gradient_of(part: Part, gradient: Tensor | None) -> Tensor | None:
    """Return what this rank holds of a gradient, of a DTensor as its parameter is divided; collective then."""
    if gradient is not None and is_dtensor(gradient) and gradient.placements != part.tensor.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=part.tensor.placements)  # type: ignore[attr-defined]
    return None if gradient is None else local_of(gradient).detach()
