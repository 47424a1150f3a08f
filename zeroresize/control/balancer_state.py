"""A balancer's state: saved, checked whole before any of it is taken over, and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroresize.comm.collectives import group_ranks
from zeroresize.config.keys import PINNABLE_MODES
from zeroresize.control.column_moves import SeenOfEpoch
from zeroresize.control.parts import Parts
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import all_segments, homes_of_layers, shape_with
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.utils.state_checks import anything, count, each, keyed, optional, row, share, tensor, text, values

#: Of every segment, by name, the units that a rank owns, ascending.
_Units = Mapping[str, Sequence[int]]


def state_of(parts: Parts, num_steps: int) -> dict[str, Any]:
    """Return what :meth:`zeroresize.balancer.Balancer.state_dict` tells after ``num_steps`` steps."""
    in_force, seen = parts.plan_execution, parts.columns.seen
    shared = {
        "num_steps": num_steps,
        "decision": parts.decision.state_dict(),
        "pins": [in_force.pins.get(rank) for rank in range(parts.num_ranks)],
        "layers": _columns_of_layers(parts),
        # A tuple is one entry of a checkpoint, which a model with other dropout finds too.
        "dropout_calls": ({name: dropout.num_calls for name, dropout in _keyed_dropouts(parts).items()},),
    }
    of_rank = {
        "units": (parts.columns.units,),
        "selector": parts.selector.state_dict(),
        "measurement": parts.monitor.state_dict(),
        # Also for another kind of statistic, which leaves it alone.
        "statistic": (_name_of_statistic(parts), dict(seen.state), dict(seen.units), seen.steps_unseen),
        "last_gradients": (
            {name: dict(vars(layer.last)) for name, layer in parts.layers.items() if layer.last is not None},
        ),
    }
    return dict(zip(_keys(parts), (shared, of_rank), strict=True))


def why_not_loadable(parts: Parts, state_dict: Any) -> ValueError | None:
    """Return the error of what is missing in ``state_dict``, or of another kind or model; None if it can be loaded."""
    keys = _keys(parts)
    for key in keys:
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            there_is = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            return ValueError(f"no balancer state of {key!r}: there is {there_is}")
    try:
        _require_shared(parts, state_dict[keys[0]], keys[0])
        _require_own(parts, state_dict[keys[1]], keys[1])
    except ValueError as error:
        problem = ValueError(f"the balancer's state cannot be loaded: {error}")
        problem.__cause__ = error
        return problem
    return None


def require_loadable(parts: Parts, problem: Exception | None) -> None:
    """Check that all ranks that move alike have a state that they can load; collective.

    Args:
        problem: of this rank with its own; it is this rank's to raise.

    Raises:
        ValueError: on a rank without a problem, if others have one.
        RuntimeError: if not all ranks come.
    """
    everybody = parts.exchange_of_replicas
    if everybody is None:
        return
    problems = everybody.meet(float(problem is not None))
    unable = [rank for rank, (has_problem, *_) in enumerate(problems) if has_problem]
    if unable and problem is None:
        has_replicas = len(everybody.ranks) > parts.num_ranks
        named = [everybody.ranks[rank] for rank in unable] if has_replicas else unable
        raise ValueError(
            f"ranks {named} of the {'job' if has_replicas else 'group'} cannot load their balancer's state (their "
            "errors say why): no rank has loaded anything"
        )


def load_state(parts: Parts, state_dict: Mapping[str, Any], *, gathers: bool) -> int:
    """Take over a state that can be loaded, but for :func:`load_what_is_of_units`; nothing of a plan is in force then.

    Args:
        gathers: whether all ranks of the group load now: what is known of columns goes to whoever owns their units.
            Else it begins anew where another rank owned them.

    Returns:
        The number of steps.

    Raises:
        RuntimeError: if not all ranks come.
    """
    shared, of_rank = (state_dict[key] for key in _keys(parts))
    in_force = parts.plan_execution
    parts.decision.load_state_dict(shared["decision"])
    in_force.take_back()
    (units,) = of_rank["units"]
    homes = homes_of_layers(parts.layers, lambda layer: _units_of_layer(units, parts, layer))
    parts.selector.load_state_dict(of_rank["selector"], homes)
    parts.columns.follow(gathers=gathers)
    for name, dropout in _keyed_dropouts(parts).items():
        dropout.resume(shared["dropout_calls"][0].get(name, 0))
    pins = enumerate(shared["pins"]) if parts.config.mode in PINNABLE_MODES else ()
    in_force.pins = {rank: ratio for rank, ratio in pins if ratio is not None}
    parts.monitor.load_state_dict(of_rank["measurement"])
    in_force.shares_of_last_step = None
    num_steps: int = shared["num_steps"]
    return num_steps


def load_what_is_of_units(parts: Parts, state_dict: Mapping[str, Any]) -> None:
    """Take over what a state holds of the units that it was saved with, where this rank owns just these; else begin
    it anew."""
    of_rank = state_dict[_keys(parts)[1]]
    name_of_statistic, *seen = of_rank["statistic"]
    if name_of_statistic == _name_of_statistic(parts):
        parts.columns.see_on(SeenOfEpoch(*seen))
    else:
        parts.columns.restart_statistic()  # what it saw until now was of other weights
    (units,), (last_gradients,) = of_rank["units"], of_rank["last_gradients"]
    for name, layer in parts.layers.items():
        if layer.last is not None and name in last_gradients and _has_units(units, parts, layer):
            known = {key: last_gradients[name][key] for key in vars(layer.last)}
            layer.last = LastGradients(**known).to(layer.local_weight.device)


def _keys(parts: Parts) -> tuple[str, str]:
    """Return the key of the part that is the same on every rank of the group, and the key of this rank's own."""
    shared = "group " + "-".join(map(str, group_ranks(parts.process_group)))
    return shared, f"{shared} rank {parts.rank}"


def _name_of_statistic(parts: Parts) -> str | None:
    return None if parts.statistic is None else f"{parts.config.priority} {parts.config.paper.snapshot}"


def _units_of_layer(units: _Units, parts: Parts, layer: BalancedLinear) -> Sequence[int]:
    """Return which of ``units`` a layer of a segment held; those of even shares where they do not tell."""
    segment = layer.segment
    assert segment is not None
    even = OwnershipMap.even(len(segment.owned.owners), segment.owned.num_ranks)
    return units[segment.name] if segment.name in units else even.units_of(parts.rank).tolist()


def _has_units(units: _Units, parts: Parts, layer: BalancedLinear) -> bool:
    """Tell whether a layer holds just what it held of ``units``."""
    segment = layer.segment
    if segment is None:
        return True
    return list(_units_of_layer(units, parts, layer)) == segment.owned.units_of(parts.rank).tolist()


def _shape(units: _Units, parts: Parts, layer: BalancedLinear) -> tuple[int, ...]:
    """Return [N, K] of a layer with what it held of ``units``."""
    if layer.segment is None:
        return tuple(layer.even_shape)
    return shape_with(layer, len(_units_of_layer(units, parts, layer)))


def _keyed_dropouts(parts: Parts) -> dict[str, UnitDropout]:
    """Dropout whose masks follow from how often it was called, by its segment's name and its place there."""
    segments = parts.units.segments if parts.units is not None else ()
    return {
        f"{segment.name}/{number}": dropout
        for segment in segments
        for number, (dropout, _) in enumerate(segment.dropouts)
        if isinstance(dropout, UnitDropout)
    }


def _columns_of_layers(parts: Parts) -> dict[str, int]:
    return {name: layer.even_shape[1] for name, layer in parts.layers.items()}


def _require_shared(parts: Parts, state: Any, where: str) -> None:
    """Raises ValueError, naming what is missing or of another kind, or layers that are others."""
    keyed({"layers": values(count)})(state, where)
    columns = _columns_of_layers(parts)
    if state["layers"] != columns:
        differing = sorted(set(columns.items()) ^ set(state["layers"].items()))
        raise ValueError(f"it is of another model, whose (layer, columns) differ: {differing[:6]}")
    keyed(
        {
            "num_steps": count,
            "decision": parts.decision.state_check,
            "pins": each(optional(share), parts.num_ranks),
            "dropout_calls": row(values(count)),
        }
    )(state, where)


def _require_own(parts: Parts, state: Any, where: str) -> None:
    """Raises ValueError, naming what is missing or of another kind."""

    def check_units(saved: Any, where: str) -> None:
        row(values(each(count)))(saved, where)
        for segment in all_segments(parts.layers):
            units, num_units = saved[0].get(segment.name, []), len(segment.owned.owners)
            if sorted(set(units)) != list(units) or any(unit >= num_units for unit in units):
                raise ValueError(f"{where}[0].{segment.name}: ascending numbers below {num_units} are needed")

    keyed({"units": check_units})(state, where)
    (units,) = state["units"]
    shapes = {name: _shape(units, parts, layer) for name, layer in parts.layers.items()}

    def check_statistic(saved: Any, where: str) -> None:
        row(optional(text), values(tensor()), values(each(count)), count)(saved, where)
        statistic = parts.statistic
        if statistic is not None and saved[0] == _name_of_statistic(parts) and saved[2] == parts.columns.units:
            keyed({name: tensor(value.shape) for name, value in statistic.state_dict().items()})(
                saved[1], f"{where}[1]"
            )

    def check_last_gradients(saved: Any, where: str) -> None:
        row(values(anything))(saved, where)
        for name, layer in parts.layers.items():
            if layer.last is not None and name in saved[0]:
                kinds = {"dx_TK": optional(tensor()), "dw_NK": optional(tensor(shapes[name]))}
                keyed(kinds)(saved[0][name], f"{where}[0].{name}")

    keyed(
        {
            "selector": parts.selector.state_check({name: shape[1] for name, shape in shapes.items()}),
            "measurement": parts.monitor.state_check,
            "statistic": check_statistic,
            "last_gradients": check_last_gradients,
        }
    )(state, where)
