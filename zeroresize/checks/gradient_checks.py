"""What must hold of gradients: they are derivatives, tied ones are alike, they add up, and a clipping takes their norm.

A backward must give the derivative of its own forward, which differences of losses measure, whatever the host is.
``θ`` are the parameters of all ranks, ``v`` a direction in them: the same on every rank for what is replicated, drawn
on each rank for shards. Σ ⟨gradient, v⟩, with replicated gradients counted once, must be
(L(θ + h·v) − L(θ − h·v)) / 2h.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroresize.checks.apart import Apart, number_of
from zeroresize.checks.divided import Part
from zeroresize.checks.finding import (
    BACKWARDS,
    DERIVATIVE,
    GRADIENTS,
    MULTIPLIED,
    NORM,
    PARTIAL,
    TIE,
    UNREAD,
    ParallelFinding,
    finding,
)
from zeroresize.checks.recording import Event, are_all_alike, numbers_in
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.splitting import probably_untied
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.torch_private import is_dtensor

#: Parameters whose derivatives are measured one by one, where their sum is wrong.
_MOST_MEASURED, _MOST_NAMED = 200, 4


class JudgedGradient(NamedTuple):
    """A parameter's gradient beside the derivative measured in a direction: ``products`` are ⟨gradient, v⟩ by rank."""

    part: Part
    products: Sequence[float]
    measured: float

    @property
    def gradient(self) -> float:
        """Of the undivided parameter, if it is right."""
        return sum(self.products) / (1 if self.part.is_shard else len(self.products))


class GradientCheck:
    """Compares gradients of the copies with measured derivatives, for as long as the model computes apart."""

    def __init__(self, apart: Apart, parts: Sequence[Part], gradients: Mapping[str, Tensor], tolerance: float) -> None:
        self._apart, self._parts, self._ranks = apart, parts, apart.ranks
        self._gradients = local_gradients(parts, gradients)
        of_ranks = self._ranks.share({name: numbers_in(one) for name, one in self._gradients.items()})
        self._has_gradient = {name for of_rank in of_ranks for name in of_rank}
        #: Below it a gradient is only rounding, as that of a bias of keys.
        least = tolerance * max((rows[0][-1] for of_rank in of_ranks for rows in of_rank.values()), default=0.0)
        self._differing = set()
        for name in (part.name for part in parts if not part.is_shard):
            numbers = [of_rank.get(name, []) for of_rank in of_ranks]
            is_rounding = all(rows and rows[0][-1] < least for rows in numbers)
            if not is_rounding and not are_all_alike(numbers, tolerance):
                self._differing.add(name)
        modules: list[Any] = [one for one in apart.inner.modules() if getattr(one, "padding_idx", None) is not None]
        self._padded = {id(module.weight): module.padding_idx for module in modules if hasattr(module, "weight")}
        #: The cube root of what is rounding balances that against the curvature of the loss.
        self._step = torch.finfo(apart.dtype).eps ** (1 / 3)

    def find(self, events: Sequence[Event], loss: str) -> list[ParallelFinding]:
        """Find what is wrong with gradients: the cause, and where it begins, not all that follows from it.

        Whatever stands before a wrong gradient in the forward has another one, too: named is what comes last.
        """
        if self.is_right():
            return []
        calls = {event.module: at for at, event in reversed(list(enumerate(events)))}
        judged = [self.judge(part) for part in self._parts[:_MOST_MEASURED]]
        judged.sort(key=lambda each: calls.get(each.part.name.rpartition(".")[0], -1))
        findings: list[ParallelFinding] = []
        unreached: list[JudgedGradient] = []
        wrong: dict[str, list[JudgedGradient]] = {GRADIENTS: [], MULTIPLIED: [], DERIVATIVE: []}
        for each in judged:
            name = each.part.name
            if name not in self._has_gradient and not self._is_measured(each, 0.0):
                unreached.append(each)
            elif name not in self._has_gradient and not _is_idle_expert(name, calls):
                what = "no gradient reaches it, and the loss is the same without it"
                findings.append(finding(UNREAD, what, parameter=name))
            elif name in self._differing and self._is_measured(each, sum(each.products)):
                what = f"only the sum of the ranks' gradients is the measured derivative: {_figures(each)}"
                findings.append(finding(PARTIAL, what, parameter=name, operation="all-reduce of the gradient"))
            elif name in self._differing:
                wrong[GRADIENTS].append(each)
            elif name in self._has_gradient and not self._is_measured(each, each.gradient):
                wrong[MULTIPLIED if self._times(each) else DERIVATIVE].append(each)
        if unreached:
            findings.append(_last_of(DERIVATIVE, unreached, "no gradient reaches it, and the loss changes with it"))
        if wrong[GRADIENTS]:
            findings.append(_last_of(GRADIENTS, wrong[GRADIENTS], "nor is their sum"))
        if wrong[MULTIPLIED]:
            times = self._times(wrong[MULTIPLIED][-1])
            what = f"it is {times:g} times the measured derivative"
            measurable = [self._times(each) for each in judged if abs(each.measured) > 10.0 * self._noise()]
            if len(measurable) > 1 and set(measurable) == {times}:
                findings.append(finding(MULTIPLIED, f"{what}, in all parameters", operation=loss))
            else:
                findings.append(_last_of(MULTIPLIED, wrong[MULTIPLIED], what))
        if wrong[DERIVATIVE] and not findings:
            findings.append(_last_of(DERIVATIVE, wrong[DERIVATIVE], "alike on all ranks, and other than measured"))
        return findings

    def is_right(self) -> bool:
        """Tell whether all gradients together are the derivative, in one direction."""
        directions = {part.name: self._direction(part) for part in self._parts}
        if self._differing or not self._has_gradient.issuperset(directions):
            return False
        products = self._products(directions)
        expected = sum(JudgedGradient(part, products[part.name], 0.0).gradient for part in self._parts)
        coarse, fine = (self._derivative(directions, scale * self._step) for scale in (2.0, 1.0))
        error = 10.0 * abs(coarse - fine) + self._noise() + 1e-6 * max(abs(expected), abs(fine))
        return abs(expected - fine) <= error

    def judge(self, part: Part) -> JudgedGradient:
        """Measure the derivative of one parameter, in a direction of which its gradient is a part."""
        v = self._direction(part)
        local = self._gradients.get(part.name, torch.zeros_like(part.local))
        along = local if part.is_shard else self._ranks.sum(local)
        if float(along.norm()):
            v = self._unpadded(part, v + along * (v.norm() / along.norm()))
        direction = {part.name: v * (max(1.0, float(part.local.norm())) / v.norm().clamp_min(1e-30))}
        return JudgedGradient(part, self._products(direction)[part.name], self._derivative(direction, self._step))

    def _is_measured(self, judged: JudgedGradient, gradient: float) -> bool:
        largest = max(abs(gradient), abs(judged.measured))
        return abs(gradient - judged.measured) <= 50.0 * self._step * largest + self._noise()

    def _times(self, judged: JudgedGradient) -> float:
        """Which multiple of the measured derivative the gradient is, a power of the ranks' number; else 0."""
        if abs(judged.measured) <= 10.0 * self._noise():
            return 0.0
        multiples = [float(self._ranks.size) ** power for power in (1, 2, -1, -2)]
        return next((times for times in multiples if self._is_measured(judged, judged.gradient / times)), 0.0)

    def _noise(self) -> float:
        """Of a derivative: what rounding of the losses makes of it."""
        return 100.0 * torch.finfo(self._apart.dtype).eps * max(1.0, abs(self._apart.last_value)) / self._step

    def _direction(self, part: Part) -> Tensor:
        """Draw a direction as large as the parameter itself is."""
        seed = zlib.crc32(f"{part.name} {self._ranks.rank if part.is_shard else ''}".encode())
        local = part.local
        drawn = torch.randn(local.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        size = float(local.norm()) / max(local.numel(), 1) ** 0.5
        return self._unpadded(part, (drawn * (size or 0.1)).to(local))

    def _unpadded(self, part: Part, v: Tensor) -> Tensor:
        """But for rows of embeddings that have no gradient, as that of padding, with which the loss may change.

        A row of padding that a tied head reads, too, has the gradient of that alone.
        """
        if id(part.tensor) in self._padded and part.name in self._gradients:
            v[(self._gradients[part.name] == 0.0).all(-1)] = 0.0
            if not part.is_shard:
                v[self._padded[id(part.tensor)]] = 0.0
        return v

    def _products(self, directions: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """⟨gradient, v⟩ on every rank."""
        held = {name: self._gradients.get(name, torch.zeros_like(v)) for name, v in directions.items()}
        products = [float((held[name].double() * v.double()).sum()) for name, v in directions.items()]
        return dict(zip(directions, map(list, zip(*self._ranks.share(products), strict=True)), strict=True))

    def _derivative(self, directions: Mapping[str, Tensor], step: float) -> float:
        parts = [part for part in self._parts if part.name in directions]
        moved = [(part.local, part.local.clone(), directions[part.name]) for part in parts]
        values = []
        try:
            for sign in (1.0, -1.0):
                for local, was, v in moved:
                    local.copy_(was.add(v, alpha=sign * step))
                values.append(self._apart.value())
        finally:
            for local, was, _ in moved:
                local.copy_(was)
        return (values[0] - values[1]) / (2.0 * step)


def local_gradients(parts: Sequence[Part], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this rank holds of gradients, of DTensors as their parameters are divided; collective then."""
    held = {}
    for part in parts:
        gradient: Any = gradients.get(part.name)
        if is_dtensor(gradient) and gradient.placements != part.tensor.placements:  # type: ignore[attr-defined]
            gradient = gradient.redistribute(placements=part.tensor.placements)  # type: ignore[attr-defined]
        if gradient is not None:
            held[part.name] = local_of(gradient).detach()
    return held


def _last_of(cause: str, judged: Sequence[JudgedGradient], what: str) -> ParallelFinding:
    """The finding of what comes last in the forward, hence first in the backward."""
    names = [each.part.name for each in judged[::-1]]
    more = f"; so is that of {', '.join(names[1:_MOST_NAMED])}{', …' * (len(names) > _MOST_NAMED)}" if names[1:] else ""
    return finding(cause, f"{what}: {_figures(judged[-1])}{more}", parameter=names[0], operation="backward")


def _figures(judged: JudgedGradient) -> str:
    ranks = ", ".join(f"{product:.4g}" for product in judged.products[:_MOST_NAMED])
    of_ranks = "the ranks' shards" if judged.part.is_shard else "the ranks"
    return f"in one direction {ranks} on {of_ranks}, and {judged.measured:.4g} by differences of the loss"


def _is_idle_expert(name: str, calls: Collection[str]) -> bool:
    """Whether an item of a list that holds it was not called, and another was, as where tokens choose experts."""
    path = name.split(".")
    items = [(".".join(path[:at]), ".".join(path[: at + 1])) for at, word in enumerate(path) if word.isdigit()]
    return any(item not in calls and holder in {call.rpartition(".")[0] for call in calls} for holder, item in items)


def find_broken_ties(
    model: nn.Module, reference: nn.Module | None, gradients: Mapping[str, Tensor], ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Find parameters that should be tied, or are equal as embeddings that were tied, and have different gradients."""
    reasons = dict.fromkeys(_declared_ties(model, reference), "the model says that they are one")
    for pair in probably_untied(model, are_divided=False):
        reasons.setdefault(pair, "they are bitwise equal")
    findings = []
    for first, second in sorted(set.intersection(*(set(map(tuple, pairs)) for pairs in ranks.share(list(reasons))))):
        if any(ranks.share(_are_different(gradients.get(first), gradients.get(second), tolerance))):
            detail = f"{second} and {first} are two parameters with other gradients, and {reasons[first, second]}"
            findings.append(finding(TIE, detail, parameter=second, operation="tie"))
    return findings


def _declared_ties(model: nn.Module, reference: nn.Module | None) -> list[tuple[str, str]]:
    """Return pairs of names of parameters that a reference holds as one, or that transformers' keys say are one."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in () if reference is None else reference.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) and hasattr(model, "get_input_embeddings"):
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
        names[0] = [f"{name}.weight" for end in ends for name, module in model.named_modules() if module is end]
    return [pair for same in names.values() for pair in itertools.combinations(same, 2)]


def _are_different(first: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if first is None or other is None:
        return False
    return first.shape != other.shape or float((first - other).norm()) > tolerance * float(first.norm())


def find_backwards_that_do_not_add_up(
    single: Mapping[str, Tensor], double: Mapping[str, Tensor], ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Find parameters whose gradient after two backwards of one batch is not twice that after one."""
    norms = {name: float(gradient.norm()) for name, gradient in single.items()}
    least = 1e-6 * max(norms.values(), default=0.0)  # only rounding, as of a bias of keys
    ratios = {
        name: float(double[name].norm()) / norm
        for name, norm in norms.items()
        if norm > least and name in double and float((double[name] - 2.0 * single[name]).norm()) > tolerance * norm
    }
    seen: dict[str, float] = {}
    for of_rank in ranks.share(ratios):
        seen = {**of_rank, **seen}
    what = "after two backwards of one batch its gradient has {:.4g} times the norm of that after one"
    operation = "hook on the gradient"
    return [finding(BACKWARDS, what.format(ratio), parameter=name, operation=operation) for name, ratio in seen.items()]


def find_other_norm(
    model: Any,
    clip: Callable[[Any], Any],
    originals: Mapping[str, Tensor],
    parts: Sequence[Part],
    gradients: Mapping[str, Tensor],
    ranks: Ranks,
) -> list[ParallelFinding]:
    """Find whether a host's clipping takes another norm than that of all gradients of the undivided model.

    The parameters of ``model``, outside of what computes apart, are given these gradients meanwhile.
    """
    for name, gradient in gradients.items():
        originals[name].grad = gradient.detach().to(originals[name].dtype).clone()
    held = local_gradients(parts, {name: originals[name].grad for name in gradients})  # type: ignore[misc]
    of_ranks = ranks.share({name: float(gradient.double().square().sum()) for name, gradient in held.items()})
    of_parts = {part.name: [squares.get(part.name, 0.0) for squares in of_ranks] for part in parts}
    expected = sum(sum(of_parts[part.name]) if part.is_shard else of_parts[part.name][0] for part in parts) ** 0.5
    norms = ranks.share(ranks.together(lambda: number_of(torch.as_tensor(clip(model)))))
    if all(abs(norm - expected) <= 1e-2 * expected for norm in norms):
        return []
    detail = f"it is {norms[0]:.6g} on rank 0, and that of the undivided gradients {expected:.6g}"
    return [finding(NORM, detail, operation="clip")]
