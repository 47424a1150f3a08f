"""Each rank owns some units of its segments, which change hands as decisions want it."""

from __future__ import annotations

import gc
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.comm.exchange import Meet
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.layers.segments import owned_segments, segment_works
from zeroresize.layers.weight_checks import is_sharded_in
from zeroresize.optim.independence import steps_by_place, why_not_elementwise
from zeroresize.optim.optimizers import hook_steps, stepped_tensors, torch_optimizer, why_others_step, why_sharded
from zeroresize.optim.shared_gradients import tell_host_of
from zeroresize.plan.ownership import CopyCosts, OwnershipMap, SegmentWork, checked_shares, owned_shares, unit_counts
from zeroresize.policy.moves.move_cost import most_bytes
from zeroresize.resharding.agreement import CannotMoveError, gather_reasons, meet_prepared
from zeroresize.resharding.data_parallel import DataParallelReplicas, reducers_of, sharded_optimizer
from zeroresize.resharding.fully_sharded import FullySharded, fully_sharded_in, why_not_reduced
from zeroresize.resharding.parameter_state import why_of_fixed_size
from zeroresize.resharding.replaced_parts import ReplacedParts
from zeroresize.resharding.units.moving_units import bytes_of_units, contents_of, move_units, why_sharded_for_good
from zeroresize.utils.torch_state import fingerprint_of_bits

logger = logging.getLogger(__name__)

_ALONE = DataParallelReplicas()


@dataclass(frozen=True)
class Move:
    """Records units that changed hands, as one rank saw it.

    Attributes:
        before, after: shares by which units were divided.
        sent_bytes, received_bytes: of this rank.
        total_bytes: that changed hands, in all replicas of the group; the same on every rank.
        most_bytes: that one rank sent, or received; the same on every rank.
        seconds: that it took; the same on every rank.
        changes: of every kind, by how many units of all segments each rank has more now; negative for fewer.
        owned_before: of every kind, how many each rank had.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    sent_bytes: int
    received_bytes: int
    total_bytes: int
    most_bytes: int
    seconds: float
    changes: Mapping[str, tuple[float, ...]]
    owned_before: Mapping[str, tuple[float, ...]]


class OwnedUnits:
    """Carries out one ownership after another; every call that moves is collective over the group.

    Args:
        model, layers, optimizer, process_group: as of :class:`~zeroresize.balancer.Balancer`.
        replicas: who else holds this rank's shards.

    Attributes:
        meet: exchanges numbers with all ranks of the group; to be replaced where replicas move, too.
        segments: of the model, in its order; ``sharing`` are those with rows that several units share.
        works: what decisions must know of them, and then of what stays unevenly divided.
        shares: by which the units are divided now, one a rank.
        moves: that were made since :meth:`forget_moves`.
        checks: each tells why units may not move now, though they might at the start; None where they may. They may
            answer otherwise on other ranks.
        why_not_divisible: why the optimizer does not let units be divided unevenly; None where it does.
        why_not_stepped: which of their parameters something else steps, whose state would not move along; or None.
        why_not_movable: why no unit may change hands, for that or another reason; None where they may.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, BalancedLinear],
        optimizer: Any,
        process_group: ProcessGroup,
        *,
        meet: Meet,
        replicas: DataParallelReplicas = _ALONE,
    ) -> None:
        self._model, self._optimizer, self._group, self.meet = model, optimizer, process_group, meet
        self._sharded = sharded_optimizer(optimizer)
        self._rank, self._num_ranks = group_rank(process_group), group_size(process_group)
        self.segments: Sequence[OwnedSegment] = owned_segments(layers)
        self._layers, self.sharing = layers, [segment for segment in self.segments if segment.owned.block > 1]
        sharded = fully_sharded_in(model, reshard=True)
        self._is_fully_sharded = any(
            is_sharded_in(where.owner, where.parameter) for segment in self.segments for where in segment.tensors
        )
        are_whole = bool(self.sharing) and (self._steps_by_place or self._is_fully_sharded)
        for segment in self.sharing if self.is_home else ():  # else they go on as they are
            segment.keep_whole(blocks=are_whole, wholes=False)
        fails = "fully_shard" if self._is_fully_sharded else None
        if self._sharded is not None and not self._sharded.steps_empty:
            fails = type(optimizer).__name__
        for segment in self.segments if fails else ():
            if not min(segment.owned.counts):
                raise ValueError(
                    f"a rank has no {segment.kind} of {segment.name}, and {fails} fails in the backward of an "
                    "empty parameter: let every rank have some"
                )
            segment.min_units = segment.min_units or segment.quantum
        self.works: tuple[SegmentWork, ...] = segment_works(layers)
        if self.sharing:
            with suppress(ValueError, TypeError):  # nothing that torch steps is in it
                tell_host_of(optimizer)
        self.shares = next((segment.shares for segment in self.segments), self.home)
        self.moves: list[Move] = []
        self._has_dtensors = any(layer.has_dtensors for layer in layers.values())
        self._has_packed_dtensors = any(layer.refused_at_home for layer in layers.values())
        self._is_guarded = not self._has_dtensors
        self.checks: list[Callable[[], str | None]] = [
            ReplacedParts(model, layers, optimizer).why_not_same,
            self._why_captured,
        ]
        self._noting = [reducer for reducer in reducers_of(model) if any(True for _ in reducer.beside())]
        if self._noting:
            with suppress(ValueError):  # nothing that torch steps is in it
                hook_steps(optimizer, after=self._after_step)
        self._owned_by: tuple[tuple[float, ...], float] = (), 1.0
        self.why_not_divisible, self.why_not_stepped = self._why_not_divided_or_stepped()
        self.why_not_movable = self._why_not_movable(replicas, sharded)

    def _after_step(self) -> None:
        for reducer in self._noting:
            reducer.note_step()

    @property
    def home(self) -> tuple[float, ...]:
        """Return the shares by which hosts shard: even ones."""
        return (1.0,) * self._num_ranks

    @property
    def is_home(self) -> bool:
        """Return whether every rank owns what its host gave it."""
        return all(segment.owned.is_home for segment in self.segments)

    def are_away(self) -> bool:
        """Return whether some rank owns something else than its host gave it."""
        return not self.is_home

    @property
    def owned(self) -> float:
        """Return what this rank owns of the products, as a multiple of what it owns at even shares."""
        by, owned = self._owned_by
        if by != self.shares:
            owned = owned_shares(self.shares, self.works)[self._rank]
            self._owned_by = self.shares, owned
        return owned

    @property
    def num_units(self) -> dict[str, tuple[float, ...]]:
        """Return how many units of every kind each rank owns, of all segments; 1.5 where it computes half of one."""
        counts: dict[str, tuple[float, ...]] = {}
        for segment in self.segments:
            known = counts.get(segment.kind, (0,) * self._num_ranks)
            counts[segment.kind] = tuple(map(operator.add, known, segment.counts))
        return counts

    def expect_copies(self, costs: CopyCosts) -> None:
        """Divide units by what copies cost from now on; at home, as elsewhere shares would mean other units then."""
        for segment in self.sharing if self.is_home else ():
            segment.copy_costs = costs
            segment.keep_whole(blocks=False, wholes=costs.are_whole)
        self.works = segment_works(self._layers)

    @property
    def bytes_of_units(self) -> int:
        """Return the bytes of a rank's units at even shares, with optimizer state, as far as this rank has units."""
        return bytes_of_units(self.segments, self._optimizer, self._rank, fully_sharded_in(self._model))

    def checked(self, shares: Any) -> tuple[float, ...]:
        """Return ``shares`` as :meth:`move` takes them."""
        checked = checked_shares(shares, self._num_ranks, call="move")
        if self.why_not_movable is not None:
            raise ValueError(f"move({shares}): no unit can change hands: {self.why_not_movable}")
        return checked

    def agree(self) -> None:
        """Agree that where units of one rank cannot move or be divided, those of no rank can; collective.

        What segments name by ``extra`` must be of single units: not the same on all ranks, unless for all units.
        """
        tensors = (where for segment in self.segments for where in segment.tensors)
        others = (where for where in tensors if not isinstance(where.owner, BalancedLinear))
        extra = [where for where in others if not is_sharded_in(where.owner, where.parameter)]
        table = self.meet(0.0, *(_print_of(where, self._rank) for where in extra)) if extra else ()
        for where, prints in zip(extra, list(zip(*table, strict=False))[1:], strict=False):
            if len(set(prints)) == 1:
                raise ValueError(
                    f"extra: {where.name} is the same on all ranks: what is named there must hold rows of this rank's "
                    "units alone"
                )
        reasons = self.why_not_divisible, self.why_not_stepped, self.why_not_movable
        self.why_not_divisible, self.why_not_stepped, self.why_not_movable = gather_reasons(self.meet, *reasons)
        if self.why_not_divisible is not None and not (self.is_home and self._name_apart is None):
            raise ValueError(f"units are divided by the shares {list(self.shares)}: {self.why_not_divisible}")

    def why_not_now(self) -> str | None:
        """Return why units may not move now, though they might at the start, as far as this rank knows."""
        return next(filter(None, (check() for check in self.checks)), None)

    def move(self, shares: Sequence[float], why_not: str | None = None) -> Move | None:
        """Divide the units by ``shares``; None where that is how they are divided already.

        Args:
            why_not: why this rank refuses; None if it does not.

        Raises:
            CannotMoveError: on every rank, if something on one of them cannot move; nothing has changed.
            NotEnoughMemoryError: on every rank, if one lacks the memory; nothing has changed.
            RuntimeError: if the ranks do not agree, or one has died; nothing has changed here, unless the error says
                that the units have moved.
        """
        before, after = self.shares, tuple(shares)
        if after == before or not self.segments:
            return None
        if self.why_not_divisible is not None:
            raise CannotMoveError(f"nothing has changed: {self.why_not_divisible}")
        sharded = fully_sharded_in(self._model, reshard=True)  # what was gathered for an evaluation is sharded again
        why = why_not or self.why_not_now() or why_not_reduced(sharded)
        meet_prepared(self.meet, (0.0,) if why is None else CannotMoveError(why), "a move of units", moves=True)
        targets = {
            segment.name: segment.owned.with_counts(unit_counts(after, work))
            for segment, work in zip(self.segments, self.works[: len(self.segments)], strict=True)
        }
        owned_before = self.num_units
        try:
            reports = self._carry_out(targets, sharded)
        except ValueError as error:  # the others have heard why
            raise CannotMoveError(f"nothing has changed: {error}") from error
        for segment in self.segments:
            segment.shares = after
        self.shares, self._is_guarded = after, not self._has_dtensors
        try:
            table = self.meet(*map(sum, zip(*reports, strict=True)))
        except RuntimeError as error:
            raise RuntimeError(f"the units have moved, they are divided by {list(after)} now; then: {error}") from error
        sent, received, seconds = zip(*table, strict=True)
        changes = {kind: tuple(map(operator.sub, now, owned_before[kind])) for kind, now in self.num_units.items()}
        move = Move(
            before=before,
            after=after,
            sent_bytes=sum(sent_here for sent_here, *_ in reports),
            received_bytes=sum(received_here for _, received_here, _ in reports),
            total_bytes=int(sum(sent)),
            most_bytes=int(most_bytes(sent, received)),
            seconds=max(seconds),
            changes=changes,
            owned_before=owned_before,
        )
        self.moves.append(move)
        return move

    def _carry_out(
        self, targets: Mapping[str, OwnershipMap], sharded: Mapping[int, FullySharded]
    ) -> list[tuple[int, int, float]]:
        """Move units to ``targets``; return the bytes sent and received, and the seconds, of each part of the move.

        What fully_shard has sharded moves segment by segment, so that no more is gathered at once; all or nothing, too.
        """
        before = {segment.name: segment.owned for segment in self.segments}
        parts = [[segment] for segment in self.segments] if self._is_fully_sharded else [self.segments]
        reports: list[tuple[int, int, float]] = []

        def move_part(part: Sequence[OwnedSegment], targets: Mapping[str, OwnershipMap]) -> None:
            report = move_units(
                part,
                {segment.name: targets[segment.name] for segment in part},
                process_group=self._group,
                optimizer=self._optimizer,
                meet=self.meet,
                model=self._model,
                sharded=sharded,
            )
            reports.append((report.sent_bytes, report.received_bytes, report.seconds))

        try:
            for part in parts:
                move_part(part, targets)
        except Exception as error:
            moved = parts[: len(reports)]
            try:
                for part in moved:
                    move_part(part, before)
            except Exception as again:
                names = [segment.name for part in moved for segment in part]
                raise RuntimeError(f"units of {names} have moved, and may not be back: {again}") from error
            raise
        return reports

    @property
    def _named_layers(self) -> Iterator[tuple[str, Any]]:
        return (pair for segment in self.segments for pair in zip(segment.layers, segment.modules, strict=True))

    def _why_captured(self) -> str | None:
        if (name := next((name for name, layer in self._named_layers if layer.is_captured), None)) is None:
            return None
        return (
            f"a forward of {name} was captured in a CUDA graph, which would go on to read its weight where it lay "
            "before a move. Capture once units have moved for the last time, with a Balancer of moves=False or "
            "mode='off' from then on, or leave such layers out by module_filter_fn"
        )

    def why_not_measured(self) -> str | None:
        """Return why no measurement may move units away from home; None if one may."""
        name = next((name for name, layer in self._named_layers if layer.moves_only and layer.is_compiled), None)
        if name is None:
            return None
        return (
            f"{name} computes by its host's own forward, and a compiled graph holds it, in which that is not measured: "
            "leave it out by module_filter_fn, or out of the graph by torch.compiler.disable"
        )

    def why_copied(self) -> str | None:
        """Return why units may not change hands for long, as something holds a deep copy of a layer of this rank."""
        if self._copied_layer is not None:
            gc.collect()  # a copy that nothing needs may hold itself
        if (name := self._copied_layer) is None:
            return None
        return (
            f"something holds a deep copy of {name}, which would keep its shapes when units change hands, as an "
            "average of weights (AveragedModel) that no longer fits. Drop copies that are not needed, keep a state in "
            "place of a snapshot, build a model that stays as it is anew and load its weights, or set moves: false"
        )

    @property
    def _copied_layer(self) -> str | None:
        copied = (name for name, layer in self._named_layers if layer.family is not None and len(layer.family) > 1)
        return next(copied, None)

    def guard_new_state(self) -> None:
        """Let what the optimizer has made be gathered no more than the parameters that it belongs to; no collective.

        The first step, or that after a move, makes state where there was none.
        """
        if self._is_guarded or (self.is_home and not self._has_packed_dtensors):
            return
        self._is_guarded, sharded = True, fully_sharded_in(self._model)
        for segment in self.segments:
            for contents in contents_of(segment, self._optimizer, self._rank, sharded):
                contents.guard(are_away=not segment.owned.is_home)
                self._is_guarded = self._is_guarded and (contents.state.has_state or contents.state.stepped is None)

    def forget_moves(self) -> None:
        """Empty :attr:`moves`, as those made so far have been reported."""
        self.moves = []

    @property
    def may_be_apart(self) -> bool:
        """Whether the optimizer lets units that share rows be on several ranks."""
        return bool(self.sharing) and not self._steps_by_place and not self._is_fully_sharded

    @property
    def _are_apart(self) -> bool:
        """Whether several ranks hold some rows, or did at home."""
        return any(len(owned.apart) for each in self.sharing for owned in (each.owned, each.owned.at_home))

    @property
    def _name_apart(self) -> str | None:
        """A segment of which several ranks hold some rows."""
        return next((segment.name for segment in self.sharing if len(segment.owned.apart)), None)

    @property
    def _steps_by_place(self) -> bool:
        """Whether copies of what units share might not stay alike, bit by bit."""
        try:
            if self._sharded is not None or self._optimizer is None:  # gradients of copies are not handed out
                return True
            return steps_by_place(torch_optimizer(self._optimizer))
        except ValueError:  # it has none inside; a move tells
            return True

    @property
    def _parameters(self) -> dict[str, Tensor]:
        """Those that hold units, by name."""
        return {one.name: one.parameter for segment in self.segments for one in segment.tensors}

    def _why_not_divided_or_stepped(self) -> tuple[str | None, str | None]:
        """Why the optimizer does not let units be divided, and which of their parameters something else steps."""
        learning = {name: one for name, one in self._parameters.items() if one.requires_grad}
        if (sharded := self._sharded) is not None:
            others = [name for name, one in learning.items() if one not in sharded.weights]
            shards = (shard for group in torch_optimizer(self._optimizer).param_groups for shard in group["params"])
            return sharded.why_not() or why_not_elementwise(self._optimizer, shards), why_others_step(others)
        try:
            stepped = None if self._optimizer is None else stepped_tensors(self._optimizer, self._parameters)
        except ValueError:  # it keeps them in other shapes; a move tells
            stepped = None
        if stepped is None:
            return None, None
        if (name := self._name_apart) is not None and self._steps_by_place:
            return (
                f"units of {name} that share rows are on several ranks, whose copies the optimizer would step by where "
                "they lie, as fused kernels on the CPU do: use fused=False, or pass it to convert as optimizer="
            ), None
        others = [name for name in learning if name not in stepped]
        state = torch_optimizer(self._optimizer).state
        for name, tensor in {} if self.is_home else stepped.items():  # it may have stepped before they were divided
            for value in state.get(tensor, {}).values():
                if not isinstance(value, Tensor) or value.ndim != tensor.ndim:
                    continue
                shape, state_shape = tuple(local_of(tensor).shape), tuple(local_of(value).shape)
                if shape != state_shape:
                    why = f"{name} has shape {shape} and its state in the optimizer {state_shape}"
                    return f"{why}: pass optimizer= to convert where it has stepped before", why_others_step(others)
        why_not = why_sharded(self._optimizer) or why_not_elementwise(self._optimizer, stepped.values())
        return why_not, why_others_step(others)

    def _why_not_movable(self, replicas: DataParallelReplicas, sharded: Mapping[int, FullySharded]) -> str | None:
        if not self.segments:
            return "the model has no segment that is known to be divisible unevenly (convert tells why at level DEBUG)"
        tensors = (tensor for segment in self.segments for tensor in segment.tensors)
        for_good = (why_sharded_for_good(tensor, sharded.get(id(tensor.parameter))) for tensor in tensors)
        if (reason := next(filter(None, for_good), None)) is not None:
            return reason
        if self._is_fully_sharded and self._are_apart:
            return "several ranks hold rows that units share, and fully_shard divides what they hold of them otherwise"
        why_in_parts = why_sharded(self._optimizer) if self._sharded is None else self._sharded.why_not()
        if (reason := why_in_parts or replicas.why_unknown) is not None:
            return reason
        follow = {id(tensor) for reducer in reducers_of(self._model) for tensor in reducer.beside()}
        with suppress(ValueError):  # it keeps them in other shapes; a move tells
            follow |= set(map(id, stepped_tensors(self._optimizer, self._parameters).values()))
        fixed = (why_of_fixed_size(name, parameter, follow) for name, parameter in self._parameters.items())
        reasons = (self.why_not_divisible, self.why_not_stepped, *fixed)
        if (reason := next(filter(None, reasons), None)) is not None or replicas.group is None:
            return reason
        try:
            for segment in self.segments:
                contents_of(segment, self._optimizer if self._sharded is None else None, self._rank, sharded)
        except (ValueError, RuntimeError, AttributeError) as error:
            return str(error)
        return None


def _print_of(where: UnitTensor, rank: int) -> float:
    """A fingerprint of the rows of a rank's units; one that no other rank has where all units' are alike."""
    units = where.parameter.detach().movedim(where.dim, 0).unflatten(0, (-1, sum(where.rows)))
    if torch.equal(units, units[:1].expand_as(units)):
        return float(rank)
    return fingerprint_of_bits(units)


def divide_units(units: OwnedUnits, shares: Sequence[float]) -> None:
    """Divide the units of all segments by ``shares``, on which all ranks have agreed, before training; collective."""
    if (why := units.why_not_divisible or units.why_not_stepped) is not None:
        raise ValueError(f"shares={list(shares)}: units cannot be divided so: {why}")
    units.move(shares)
    units.forget_moves()
    for segment in units.segments:
        segment.has_given_shares = True
    counts = "; ".join(f"{kind} {' : '.join(map(str, of_ranks))}" for kind, of_ranks in units.num_units.items())
    totals = [sum(of_rank) for of_rank in zip(*units.num_units.values(), strict=True)]
    without = [rank for rank, total in enumerate(totals) if not total]
    logger.info(
        "units are divided by the shares %s: of all layers together the ranks own %s%s",
        list(shares),
        counts,
        f"; ranks {without} own none, and have no work in these layers" if without else "",
    )


def require_segments(shares: Sequence[float] | str, segments: Sequence[object]) -> None:
    """Raise ValueError unless there are segments to divide by ``shares``."""
    if not segments:
        raise ValueError(
            f"shares={shares!r}: no segment of the model is known to be divisible by units: name one by segments="
        )
