"""check_segments() moves some units of a model and checks that it computes the same.

``R`` ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.integrations.module_state import in_mode, random_restored, restored
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_in_graph, local_of
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.segment_draws import streams_of_all
from zeroresize.layers.segments import owned_segments
from zeroresize.layers.unit_dropout import KeyedDropout, drops
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.ranks import Ranks, TogetherError
from zeroresize.resharding.segments.in_float64 import in_float64, require_replaceable, to_float64
from zeroresize.resharding.segments.muted_draws import MutedDraws, require_drawn_alike
from zeroresize.resharding.units.moving_units import move_units
from zeroresize.utils.progress import Progress
from zeroresize.utils.torch_state import tensors_in

#: Outputs and gradients.
_Results = tuple[list[Tensor], list[Tensor]]

logger = logging.getLogger(__name__)

#: Of a tensor's largest element: more than the order of sums in float64 makes, and what modules compute in float32
#: whatever they are given; far less than a unit that is taken for another.
_TOLERANCE = 1e-6
#: Of the largest element of all tensors: those that are only rounding are measured by it.
_FLOOR = 0.1


@dataclass(frozen=True)
class SegmentCheck:
    """Reports what moving some units of a segment changed; the same on every rank.

    Attributes:
        name: of the segment's row-parallel layer.
        kind: what a unit is.
        layers: names of its layers.
        output_difference, gradient_difference: by how much what the model returns, and the gradients of its parameters,
            differ from those at even shares, as a share of a tensor's largest element. NaN where nothing was computed,
            as where every rank has only what it must keep, such as one KV group.
        problem: what is wrong; None where the segment moves soundly.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    output_difference: float
    gradient_difference: float
    problem: str | None = None


def check_segments(
    model: nn.Module, batch: Any, *, forward: Callable[[nn.Module, Any], Any] | None = None
) -> list[SegmentCheck]:
    """Try whether units of each segment can lie on any rank: move some there and back, and compare what is computed.

    What lies between the layers of a segment that a user names, or whose class a user registers, is the user's word.
    Here the model computes outputs and gradients for ``batch`` in float64, first evenly divided, then with some units
    of one segment after the other on other ranks: once every rank gives some to the next one, once the first rank keeps
    ``min_units`` of them. The model is left bit for bit as it was: parameters, gradients, buffers, attributes and
    random states; an optimizer is not needed. Needs memory for a copy in float64.

    Collective: call alike on every rank of the tensor-parallel group, with equal batches, after ``convert``, with all
    units at home.

    Args:
        model: what ``convert`` returned, in the mode (``train()``) in which it is to be checked.
        batch: what a step of training gives it: ``model(**batch)`` for a dictionary, ``model(*batch)`` for a list or a
            tuple, else ``model(batch)``. Floating-point tensors in it become float64.
        forward: ``forward(model, batch)`` in place of that. All tensors in what it returns are compared, and gradients
            are of their weighted sum. Everything that it computes must work in float64; flash attention does not.

    Returns:
        A :class:`SegmentCheck` for each segment, in the order of the model. Empty where the group has one rank.

    Raises:
        ValueError: if a segment does not move soundly, naming all that do not, and why; if the model has no segment,
            is not at home, or does not compute the same twice. On every rank.
        RuntimeError: if a rank does not come.
    """
    inner = unwrap(model)
    layers = {name: one for name, one in inner.named_modules() if isinstance(one, BalancedLinear)}
    segments = owned_segments(layers)
    if layers and not segments and all(group_size(one.process_group) == 1 for one in layers.values()):
        logger.info("check_segments: the process group has one rank, so there is nothing to check")
        return []
    if not segments:
        raise ValueError(
            "check_segments: the model has no segment whose units may move: convert it first; its log of level DEBUG "
            "says why layers stay even"
        )
    away = [one.name for one in segments if not one.owned.is_home]
    if away:
        raise ValueError(
            f"check_segments: units of {away[0]} are away: check before they move, or within `with balancer.at_home():`"
        )
    is_first = group_rank(segments[0].modules[-1].process_group) == 0
    if is_first:
        text = "check_segments: it computes the model in float64, three times for each of %d segments"
        logger.info(text, len(segments))
    progress = Progress("check_segments", tell=logger.info, is_shown=is_first)
    with _keyed_dropout(inner, segments), progress:
        require_replaceable(inner)
        check = _Check(inner, segments, to_float64(batch), forward or _call)
        with in_float64(inner):
            checks = check.run()
    for result in checks:
        if math.isnan(result.output_difference) and result.problem is None:
            text = "check_segments: %s (%s): not tried, as no rank has more than it must keep"
            logger.info(text, result.name, result.kind)
            continue
        differences = result.output_difference, result.gradient_difference
        text = "check_segments: %s (%s): outputs differ by %.1e, gradients by %.1e"
        logger.info(text, result.name, result.kind, *differences)
    wrong = [one for one in checks if one.problem is not None]
    if wrong:
        raise ValueError(
            f"check_segments: {len(wrong)} of {len(checks)} segments do not move soundly: "
            f"{'; '.join(f'{one.name} ({one.kind}): {one.problem}' for one in wrong)}. All layers that hold the units "
            "must be in the segment, what lies between them must compute each unit by itself, unit_size must be all "
            "that one unit has (a head's size), and on_change must set what counts units (num_heads) and all that is "
            "of single units; else leave the segment out, and its layers stay even"
        )
    return checks


@contextmanager
def _keyed_dropout(model: nn.Module, segments: Sequence[OwnedSegment]) -> Iterator[None]:
    """Key the segments' dropout by the unit while the block lasts, as a balancer that moves units would."""
    unkeyed = [segment for segment in segments if drops(segment)]
    calls_before = [dict(segment.dropout_calls) for segment in unkeyed]
    keyed = KeyedDropout(model, unkeyed, seed=0)
    try:
        yield
    finally:
        keyed.close()
        for segment, calls in zip(unkeyed, calls_before, strict=True):
            segment.dropout_calls = calls


class _Check:
    """One check, while the model is in float64."""

    def __init__(
        self, model: nn.Module, segments: Sequence[OwnedSegment], batch: Any, forward: Callable[[nn.Module, Any], Any]
    ) -> None:
        self._model, self._segments, self._batch, self._forward = model, segments, batch, forward
        self._ranks = Ranks(segments[0].modules[-1].process_group, segments[0].tensors[0].parameter.device)
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._draws_at_home: MutedDraws | None = None

    def run(self) -> list[SegmentCheck]:
        """Check every segment."""
        of_units = {id(where.parameter) for segment in self._segments for where in segment.tensors}
        kept = (buffer for buffer in self._model.buffers() if id(buffer) not in of_units)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in kept]
        homes = [(segment, segment.owned, segment.shares) for segment in self._segments]
        divisible = (segment for segment in self._segments if segment.owned.slices > 1)
        training = nn.ModuleList(layer for segment in divisible for layer in segment.modules)
        for layer in self._model.modules():
            if isinstance(layer, BalancedLinear) and not layer.is_column_parallel:
                layer.watch_forward = lambda *_: self._ranks.arrive("a row-parallel layer")
        try:
            # In evaluation ranks would compute all tokens of what they hold.
            with in_mode(training, True), streams_of_all():
                expected = self._compute_expected()
                return [self._check_segment(segment, expected) for segment in self._segments]
        finally:
            for segment, owned, shares in homes:
                was_away, segment.owned, segment.shares = segment.owned != owned, owned, shares
                if was_away:
                    segment.follow(self._ranks.rank)

    def _compute_expected(self) -> _Results:
        """Outputs and gradients at even shares."""
        try:
            expected, again = (self._ranks.together(self._compute) for _ in range(2))
        except TogetherError as error:
            raise ValueError(f"check_segments: the model does not compute the batch in float64: {error}") from error
        try:
            self._ranks.together(partial(_require_finite, expected))
            if (most := max(self._compare(expected, again))) > _TOLERANCE:
                raise ValueError(f"results of two calls differ by {most:.1e} of their largest element")
        except ValueError as error:
            why = f"check_segments: nothing can be compared with the model at even shares: {error}"
            raise ValueError(why) from error
        return expected

    def _check_segment(self, segment: OwnedSegment, expected: _Results) -> SegmentCheck:
        differences, problem = (math.nan, math.nan), None
        if not segment.may_give:
            return SegmentCheck(segment.name, segment.kind, segment.layers, *differences)
        with restored(self._model):  # so that what on_change leaves behind is not another segment's
            try:
                self._ranks.together(partial(_require_movable, segment))
                for target, where in _divisions(segment):
                    now = self._compare(expected, self._computed_with(segment, target))
                    differences = float(np.fmax(differences[0], now[0])), float(np.fmax(differences[1], now[1]))
                    _require_alike(now, f"with {where}")
                back = self._compare(expected, self._ranks.together(self._compute))
                _require_alike(back, "with all units at home again")
            except ValueError as error:  # on all ranks
                problem = str(error)
        return SegmentCheck(segment.name, segment.kind, segment.layers, *differences, problem)

    def _computed_with(self, segment: OwnedSegment, target: OwnershipMap) -> _Results:
        """Outputs once units were moved, and the gradients when they are home again."""
        home = segment.owned
        go_home = partial(self._ranks.together, partial(self._move, segment, home))
        try:
            self._ranks.together(partial(self._move, segment, target))
            outputs, _ = self._ranks.together(self._compute)
        except TogetherError:
            with suppress(TogetherError):  # the first one says more
                go_home()
            raise
        go_home()
        return outputs, self._gradients()

    def _move(self, segment: OwnedSegment, target: OwnershipMap) -> None:
        if segment.owned != target:
            ranks, targets = self._ranks, {segment.name: target}
            move_units([segment], targets, process_group=ranks.process_group, optimizer=None, meet=ranks.meet)

    def _compute(self) -> _Results:
        """Outputs and gradients of the model as it is divided now, without random numbers of single units.

        They are alike on all ranks. Where a rank fails between a column- and a row-parallel layer, the others are told
        before they wait for it.
        """
        self._model.zero_grad()
        for buffer, was in self._buffers:
            buffer.copy_(was)

        def forward() -> tuple[list[Tensor], Tensor]:
            tensors = tensors_in(self._forward(self._model, self._batch))
            outputs = [local_in_graph(each) for each in tensors if each.is_floating_point()]
            return outputs, _weighted(outputs)

        without_autocast = torch.autocast(self._ranks.device.type, enabled=False)
        with random_restored(self._model), MutedDraws() as draws:
            with restored(self._model), torch.enable_grad(), without_autocast:
                outputs, loss = self._ranks.together(forward, meets=True)
            loss.backward()
        self._draws_at_home = self._draws_at_home or draws
        require_drawn_alike(draws, self._draws_at_home)
        return [output.detach() for output in outputs], self._gradients()

    def _gradients(self) -> list[Tensor]:
        """Of what this rank holds of the parameters, zeros where there are none."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [
            torch.zeros_like(local_of(parameter))
            if parameter.grad is None
            else local_of(parameter.grad).detach().clone()
            for parameter in parameters
        ]

    def _compare(self, expected: _Results, computed: _Results) -> tuple[float, float]:
        """How much outputs and gradients differ, over all ranks."""
        differences = []
        for ones, others in zip(expected, computed, strict=True):
            table = self._ranks.meet(max((float(one.abs().max()) for one in ones if one.numel()), default=0.0), 0.0)
            floor = _FLOOR * max(largest for largest, *_ in table)
            difference = max((_difference(*pair, floor) for pair in zip(ones, others, strict=False)), default=0.0)
            if len(ones) != len(others):
                difference = math.inf
            differences.append(max(number for number, *_ in self._ranks.meet(difference, 0.0)))
        return differences[0], differences[1]


def _divisions(segment: OwnedSegment) -> Iterator[tuple[OwnershipMap, str]]:
    """Other owners of some units, and how a report tells them."""
    owned = segment.owned
    owners = owned.owners.copy()
    for rank, count in enumerate(owned.counts):
        num_given = -(-count // (4 * segment.quantum)) * segment.quantum
        if segment.quantum < owned.slices and num_given % owned.slices == 0:
            num_given -= segment.quantum  # so that heads are divided
        owners[owned.units_of(rank)[:num_given]] = (rank + 1) % owned.num_ranks
    yield replace(owned, owners=owners), f"the first {segment.kind} of each rank on the next one"
    given = owned.units_of(0)[: owned.counts[0] - segment.min_units]
    if len(given):
        owners = owned.owners.copy()
        owners[given] = 1 + np.arange(len(given)) // segment.quantum % (owned.num_ranks - 1)
        kept = f"{segment.min_units} {segment.kind}" if segment.min_units else f"none of the {segment.kind}"
        yield replace(owned, owners=owners), f"{kept} on rank 0"


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _weighted(outputs: Sequence[Tensor]) -> Tensor:
    """A sum in which no two elements cancel."""
    parts = [
        (
            output * torch.linspace(-1.0, 2.0, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        ).sum()
        for output in outputs
        if output.requires_grad and output.numel()
    ]
    if not parts:
        raise ValueError("it returns no tensor that gradients can be taken of")
    return torch.stack([one.double() for one in parts]).sum()


def _difference(expected: Tensor, other: Tensor, floor: float) -> float:
    if expected.shape != other.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference = float((expected - other).abs().max())
    if difference == 0.0:
        return 0.0
    share = difference / max(float(expected.abs().max()), floor)
    return math.inf if math.isnan(share) else share


def _require_alike(differences: tuple[float, float], where: str) -> None:
    outputs, gradients = differences
    if max(differences) > _TOLERANCE:
        raise ValueError(f"{where} outputs differ by {outputs:.1e} and gradients by {gradients:.1e} of their largest")


def _require_finite(results: _Results) -> None:
    if not all(torch.isfinite(one).all() for of_kind in results for one in of_kind):
        raise ValueError("some are not finite")


def _require_movable(segment: OwnedSegment) -> None:
    if segment.why_even is not None and (reason := segment.why_even()) is not None:
        raise ValueError(reason)
