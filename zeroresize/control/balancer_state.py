"""A balancer's state: saved, checked whole before any of it is taken over, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroresize.comm.collectives import group_ranks
from zeroresize.config.keys import PINNABLE_MODES
from zeroresize.control.parts import Parts
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.utils.state_checks import anything, count, each, keyed, optional, row, share, tensor, text, values


def state_of(parts: Parts, num_steps: int) -> dict[str, Any]:
    """Return what :meth:`zeroresize.balancer.Balancer.state_dict` tells after ``num_steps`` steps."""
    in_force, statistic = parts.plan_execution, parts.statistic
    shared = {
        "num_steps": num_steps,
        "decision": parts.decision.state_dict(),
        "pins": [in_force.pins.get(rank) for rank in range(parts.num_ranks)],
        "layers": _columns_of_layers(parts),
        # A tuple is one entry of a checkpoint, which a model with other dropout finds too.
        "dropout_calls": ({name: dropout.num_calls for name, dropout in _keyed_dropouts(parts).items()},),
    }
    of_rank = {
        "selector": parts.selector.state_dict(),
        "measurement": parts.monitor.state_dict(),
        # Also for another kind of statistic, which leaves it alone.
        "statistic": (_name_of_statistic(parts), statistic.state_dict() if statistic is not None else {}),
        "last_gradients": ({name: dict(vars(last)) for name, last in _last_gradients(parts).items()},),
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


def load_state(parts: Parts, state_dict: Mapping[str, Any]) -> int:
    """Take over a state that can be loaded; nothing of a plan is in force then.

    Returns:
        The number of steps.
    """
    shared, of_rank = (state_dict[key] for key in _keys(parts))
    in_force, statistic = parts.plan_execution, parts.statistic
    parts.decision.load_state_dict(shared["decision"])
    in_force.take_back()  # the same ratio and epoch may mean other columns
    parts.selector.load_state_dict(of_rank["selector"])
    name_of_statistic, seen = of_rank["statistic"]
    if statistic is not None and not statistic.is_paused:
        if name_of_statistic == _name_of_statistic(parts):
            statistic.load_state_dict(seen)
        else:
            statistic.take()  # what it saw until now was of other weights
    (last_gradients,) = of_rank["last_gradients"]
    for name, layer in parts.layers.items():
        if layer.last is not None and name in last_gradients:
            known = {key: last_gradients[name][key] for key in vars(layer.last)}
            layer.last = LastGradients(**known).to(layer.local_weight.device)
    for name, dropout in _keyed_dropouts(parts).items():
        dropout.resume(shared["dropout_calls"][0].get(name, 0))
    pins = enumerate(shared["pins"]) if parts.config.mode in PINNABLE_MODES else ()
    in_force.pins = {rank: ratio for rank, ratio in pins if ratio is not None}
    parts.monitor.load_state_dict(of_rank["measurement"])
    in_force.shares_of_last_step = None
    num_steps: int = shared["num_steps"]
    return num_steps


def _keys(parts: Parts) -> tuple[str, str]:
    """Return the key of the part that is the same on every rank of the group, and the key of this rank's own."""
    shared = "group " + "-".join(map(str, group_ranks(parts.process_group)))
    return shared, f"{shared} rank {parts.rank}"


def _name_of_statistic(parts: Parts) -> str | None:
    return f"{parts.config.priority} {parts.config.paper.snapshot}" if _statistic_at_work(parts) else None


def _statistic_at_work(parts: Parts) -> bool:
    return parts.statistic is not None and not parts.statistic.is_paused


def _last_gradients(parts: Parts) -> dict[str, LastGradients]:
    """Return the last gradients of the layers that have the shape their host gave them, by name."""
    return {
        name: layer.last
        for name, layer in parts.layers.items()
        if layer.last is not None and layer.local_weight.shape == layer.even_shape
    }


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

    def check_statistic(saved: Any, where: str) -> None:
        row(optional(text), values(tensor()))(saved, where)
        statistic = parts.statistic
        if statistic is not None and saved[0] == _name_of_statistic(parts) is not None:  # else it starts anew
            shapes = {name: tensor(value.shape) for name, value in statistic.state_dict().items()}
            keyed(shapes)(saved[1], f"{where}[1]")

    def check_last_gradients(saved: Any, where: str) -> None:
        row(values(anything))(saved, where)
        for name, layer in parts.layers.items():
            if layer.last is not None and name in saved[0]:
                kinds = {"dx_TK": optional(tensor()), "dw_NK": optional(tensor(layer.even_shape))}
                keyed(kinds)(saved[0][name], f"{where}[0].{name}")

    keyed(
        {
            "selector": parts.selector.state_check,
            "measurement": parts.monitor.state_check,
            "statistic": check_statistic,
            "last_gradients": check_last_gradients,
        }
    )(state, where)
