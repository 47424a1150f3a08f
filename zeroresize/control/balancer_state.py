"""Whether a balancer can take over a saved state, found out before it takes over any of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroresize.control.planner import Planner
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.column_statistics import ColumnStatistic
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.policy.columns.selector import ColumnSelector
from zeroresize.utils.state_checks import anything, count, each, flag, keyed, optional, row, share, tensor, text, values


def require_parts(state_dict: Any, *keys: str) -> None:
    """Raises ValueError where ``state_dict`` has no part of one of these names."""
    for key in keys:
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            there_is = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(f"no balancer state of {key!r}: there is {there_is}")


def require_shared(state: Any, where: str, *, columns: Mapping[str, int], decision: Planner, num_ranks: int) -> None:
    """Check the part that is the same on every rank of the group.

    Args:
        columns: of every layer, by name.

    Raises:
        ValueError: naming what is missing or of another kind, or layers that are others.
    """
    keyed({"layers": values(count)})(state, where)
    if state["layers"] != columns:
        differing = sorted(set(columns.items()) ^ set(state["layers"].items()))
        raise ValueError(f"it is of another model: (layer, columns) differ: {differing[:6]}")
    keyed(
        {
            "num_steps": count,
            "decision": decision.state_check,
            "is_at_full_work": flag,
            "pins": each(optional(share), num_ranks),
        }
    )(state, where)


def require_own(
    state: Any,
    where: str,
    *,
    layers: Mapping[str, BalancedLinear],
    selector: ColumnSelector,
    monitor: RankMonitor,
    statistic: ColumnStatistic | None,
    name_of_statistic: str | None,
) -> None:
    """Check the part that is a rank's own.

    Raises:
        ValueError: naming what is missing or of another kind.
    """

    def check_statistic(saved: Any, where: str) -> None:
        row(optional(text), values(tensor()))(saved, where)
        if statistic is not None and saved[0] == name_of_statistic:  # else it starts anew
            shapes = {name: tensor(value.shape) for name, value in statistic.state_dict().items()}
            keyed(shapes)(saved[1], f"{where}[1]")

    def check_last_gradients(saved: Any, where: str) -> None:
        row(values(anything))(saved, where)
        for name, layer in layers.items():
            if layer.last is not None and name in saved[0]:
                kinds = {"dx_TK": optional(tensor()), "dw_NK": optional(tensor(layer.local_weight.shape))}
                keyed(kinds)(saved[0][name], f"{where}[0].{name}")

    keyed(
        {
            "selector": selector.state_check,
            "measurement": monitor.state_check,
            "statistic": check_statistic,
            "last_gradients": check_last_gradients,
        }
    )(state, where)
