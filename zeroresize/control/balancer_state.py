"""A balancer's state: saved, checked whole before any of it is taken over, and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroresize.comm.collectives import group_ranks
from zeroresize.config.keys import PINNABLE_MODES
from zeroresize.control.assembly import Parts
from zeroresize.control.column_moves import SeenOfEpoch
from zeroresize.control.group_decision import DecisionState
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import all_segments, homes_of_layers, shape_with
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.measure.rank_monitor import MonitorState
from zeroresize.policy.tensor.columns.selector import SelectorState
from zeroresize.resharding.agreement import text_numbers, text_of
from zeroresize.utils import codec
from zeroresize.utils.torch_state import reason

#: Of every segment, by name, the units that a rank owns, ascending.
_Units = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class _Shared:
    """What is the same on every rank of the group; layers with their columns, dropout by segment and place."""

    num_steps: int
    layers: dict[str, int]
    decision: DecisionState
    pins: list[float | None]
    dropout_calls: dict[str, int]


@dataclass(frozen=True)
class _OfRank:
    """What is a rank's own; the statistic's name, and what it has seen."""

    units: dict[str, list[int]]
    selector: SelectorState
    measurement: MonitorState
    statistic: str | None
    seen: SeenOfEpoch
    last_gradients: dict[str, LastGradients]


#: All that a balancer goes on from.
BalancerState = tuple[_Shared, _OfRank]


def state_of(parts: Parts, num_steps: int) -> dict[str, Any]:
    """Return what :meth:`zeroresize.balancer.Balancer.state_dict` tells after ``num_steps`` steps."""
    return {key: codec.saved(part) for key, part in zip(_keys(parts), _present(parts, num_steps), strict=True)}


def loaded_state(parts: Parts, state_dict: Any, *, is_collective: bool) -> BalancerState:
    """Return the state of which :func:`state_of` made ``state_dict``; nothing is taken over yet.

    Args:
        is_collective: whether all ranks that move alike have a state to load, which none does unless all can.

    Raises:
        ValueError: if something is missing, of another kind, or of another model; or if other ranks cannot load theirs.
        RuntimeError: if not all ranks come.
    """
    problem, everybody = None, parts.group.everybody
    try:
        state = _loaded(parts, state_dict)
    except ValueError as error:
        problem = error
    texts = text_numbers("" if problem is None else reason(problem))
    problems = list(map(text_of, everybody.meet(*texts))) if is_collective and everybody is not None else []
    if problem is not None:
        raise problem
    if everybody is not None and (unable := [rank for rank, text in enumerate(problems) if text]):
        has_replicas = len(everybody.ranks) > parts.setup.num_ranks
        named = [everybody.ranks[rank] for rank in unable] if has_replicas else unable
        raise ValueError(
            f"ranks {named} of the {'job' if has_replicas else 'group'} cannot load their balancer's state, so no rank "
            f"has loaded anything: {problems[unable[0]]}"
        )
    return state


def load_state(parts: Parts, state: BalancerState, *, gathers: bool) -> int:
    """Take over a state, but for :func:`load_what_is_of_units`; nothing of a plan is in force then.

    Args:
        gathers: whether all ranks of the group load now: what is known of columns goes to whoever owns their units.
            Else it begins anew where another rank owned them.

    Returns:
        The number of steps.
    """
    (shared, of_rank), in_force = state, parts.mover.plans
    parts.decider.go_on_from(shared.decision)
    in_force.take_back()
    homes = homes_of_layers(parts.setup.layers, lambda layer: _units_of_layer(of_rank.units, parts, layer))
    parts.mover.selector.go_on_from(of_rank.selector, homes)
    parts.mover.columns.follow(gathers=gathers)
    for name, dropout in _keyed_dropouts(parts).items():
        dropout.resume(shared.dropout_calls.get(name, 0))
    pins = enumerate(shared.pins) if parts.setup.config.mode in PINNABLE_MODES else ()
    in_force.pins = {rank: ratio for rank, ratio in pins if ratio is not None}
    parts.observer.monitor.go_on_from(of_rank.measurement)
    in_force.shares_of_last_step = None
    return shared.num_steps


def load_what_is_of_units(parts: Parts, state: BalancerState) -> None:
    """Take over what a state holds of the units that it was saved with, where this rank owns just these; else begin
    it anew."""
    _, of_rank = state
    if of_rank.statistic == _name_of_statistic(parts):
        parts.mover.columns.see_on(of_rank.seen)
    else:
        parts.mover.columns.restart_statistic()  # what it saw until now was of other weights
    for name, layer in parts.setup.layers.items():
        last = of_rank.last_gradients.get(name)
        owned = None if layer.segment is None else layer.segment.owned.units_of(parts.setup.rank).tolist()
        has_same = owned is None or list(_units_of_layer(of_rank.units, parts, layer)) == owned
        if layer.last is not None and last is not None and has_same:
            layer.last = last.to(layer.local_weight.device)


def _present(parts: Parts, num_steps: int = 0) -> BalancerState:
    shared = _Shared(
        num_steps,
        {name: layer.even_shape[1] for name, layer in parts.setup.layers.items()},
        parts.decider.state,
        [parts.mover.plans.pins.get(rank) for rank in range(parts.setup.num_ranks)],
        {name: dropout.num_calls for name, dropout in _keyed_dropouts(parts).items()},
    )
    of_rank = _OfRank(
        parts.mover.columns.units,
        parts.mover.selector.counted(),
        parts.observer.monitor.state,
        _name_of_statistic(parts),
        parts.mover.columns.seen,  # also for another kind of statistic, which leaves it alone
        {name: layer.last for name, layer in parts.setup.layers.items() if layer.last is not None},
    )
    return shared, of_rank


def _loaded(parts: Parts, state_dict: Any) -> BalancerState:
    keys, present = _keys(parts), _present(parts)
    for key in keys:
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            there_is = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(f"no balancer state of {key!r}: there is {there_is}")
    try:
        shared = codec.loaded(_Shared, state_dict[keys[0]], keys[0], present[0])
        differing = sorted(set(present[0].layers.items()) ^ set(shared.layers.items()))
        if differing:
            raise ValueError(f"it is of another model, whose (layer, columns) differ: {differing[:6]}")
        if len(shared.pins) != parts.setup.num_ranks:
            raise ValueError(f"{keys[0]}.pins: {parts.setup.num_ranks} are needed, here are {len(shared.pins)}")
        of_rank = codec.loaded(_OfRank, state_dict[keys[1]], keys[1], present[1])
        _require_fitting(parts, of_rank, keys[1])
    except ValueError as error:
        raise ValueError(f"the balancer's state cannot be loaded: {error}") from error
    return shared, of_rank


def _require_fitting(parts: Parts, state: _OfRank, where: str) -> None:
    """Raises ValueError for units that there are not, and for columns that these do not have."""
    for segment in all_segments(parts.setup.layers):
        units, num_units = state.units.get(segment.name, []), len(segment.owned.owners)
        if sorted({*units} & {*range(num_units)}) != units:
            raise ValueError(f"{where}.units.{segment.name}: ascending numbers below {num_units} are needed")
    columns, of_units = {name: known.num_columns for name, known in state.selector.columns.items()}, {}
    for name, layer in parts.setup.layers.items():
        shape = tuple(layer.home_shape)
        if layer.segment is not None:
            shape = shape_with(layer, _units_of_layer(state.units, parts, layer))
        of_units[name] = shape[1]
    if columns != of_units:
        raise ValueError(f"{where}.selector.columns: {columns} do not fit the units")


def _keys(parts: Parts) -> tuple[str, str]:
    """Return the key of the part that is the same on every rank of the group, and the key of this rank's own."""
    shared = "group " + "-".join(map(str, group_ranks(parts.setup.process_group)))
    return shared, f"{shared} rank {parts.setup.rank}"


def _name_of_statistic(parts: Parts) -> str | None:
    config = parts.setup.config
    return None if parts.observer.statistic is None else f"{config.priority} {config.paper.snapshot}"


def _units_of_layer(units: _Units, parts: Parts, layer: BalancedLinear) -> Sequence[int]:
    """Return which of ``units`` a layer of a segment held; those of home where they do not tell."""
    segment = layer.segment
    assert segment is not None
    home = segment.owned.at_home
    return units[segment.name] if segment.name in units else home.units_of(parts.setup.rank).tolist()


def _keyed_dropouts(parts: Parts) -> dict[str, UnitDropout]:
    """Dropout whose masks follow from how often it was called, by its segment's name and its place there."""
    segments = parts.group.units.segments if parts.group.units is not None else ()
    return {
        f"{segment.name}/{number}": dropout
        for segment in segments
        for number, (dropout, _) in enumerate(segment.dropouts)
        if isinstance(dropout, UnitDropout)
    }
