"""What a balancer tells of itself: a record an update, flat numbers at any time, and what other modes would do."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

from zeroresize.control.assembly import Parts
from zeroresize.telemetry import UpdateRecord

_RECORDED_METRICS = (
    "ratio",
    "busy_s",
    "gemm_s",
    "predicted_step_s",
    "bound_s",
    "products_bound_s",
    "moving_rest",
    "is_straggler",
)


def update_record(parts: Parts, num_steps: int, balancing_since_update_s: float) -> UpdateRecord:
    """Return this rank's numbers after ``num_steps`` steps."""
    times, plan, in_force = parts.monitor.times, parts.decision.plan, parts.plan_execution
    moves, bounds = parts.units.moves if parts.units is not None else [], parts.decision.bounds
    return UpdateRecord(
        update=num_steps // parts.config.update_every,
        step=num_steps,
        epoch=parts.selector.state.epoch,
        rank=parts.rank,
        busy_s=times.busy_s + times.outside_s if times else math.nan,
        gemm_s=times.gemm_s if times else math.nan,
        is_straggler=plan.ranks[parts.rank].is_straggler,
        ratio=in_force.ratio,
        **asdict(in_force.planned),
        units={kind: own[parts.rank] for kind, own in parts.units.num_units.items()} if parts.units else {},
        moved_bytes=sum(move.sent_bytes + move.received_bytes for move in moves),
        moving_s=sum(move.seconds for move in moves),
        lent_to={str(receiver): share for receiver, share in in_force.lent_to.items()},
        layer_shares=in_force.layer_shares,
        predicted_step_s=plan.predicted_step_s,
        bound_s=bounds.of_units if bounds is not None else math.nan,
        products_bound_s=bounds.of_products if bounds is not None else math.nan,
        moving_rest=times.moving_rest if times else math.nan,
        calibration_steps=parts.decision.num_calibration_steps,
        balancing_since_update_s=balancing_since_update_s,
        would={
            mode: {
                "predicted_step_s": prediction["predicted_step_s"],
                "gain": prediction["gain"],
                "most_ratio": max(prediction["ratios"]),
            }
            for mode, prediction in what_if(parts).items()
        },
    )


def metrics(parts: Parts, num_steps: int, balancing_s: float) -> dict[str, float]:
    """Return what :meth:`zeroresize.balancer.Balancer.metrics` tells.

    Args:
        balancing_s: of the last step.
    """
    record, times = update_record(parts, num_steps, math.nan), parts.monitor.times
    executed = parts.plan_execution.shares_of_last_step or parts.plan_execution.shares_of_step
    numbers = {name: float(getattr(record, name)) for name in _RECORDED_METRICS} | {
        **{f"{name}_share": share for name, share in asdict(executed).items()},
        "group_pruned": statistics.fmean(rank.pruned * rank.owned for rank in parts.decision.plan.ranks),
        "relieved": 1.0 - record.owned * (1.0 - record.ratio),
        "least_busy_s": times.least_busy_s + times.outside_s if times else math.nan,
        "balancing_s": balancing_s,
        "statistic_bytes": float(parts.statistic.bytes_held if parts.statistic is not None else 0),
        "migration_bytes": float(parts.lender.bytes_held if parts.lender is not None else 0),
    }
    memory, units = parts.decision.memory, parts.units
    if memory is not None and units is not None:
        numbers["memory_bytes"] = memory.bytes_by(units.shares)[parts.rank]
    numbers |= {f"would/{mode}/{name}": value for mode, own in record.would.items() for name, value in own.items()}
    watched = parts.slowness.metrics() if parts.slowness is not None else {}
    return {f"balance/{name}": value for name, value in numbers.items()} | watched


def what_if(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return what :meth:`zeroresize.balancer.Balancer.what_if` tells."""
    full_s = parts.decision.plan.predicted_step_s
    return {
        mode: {
            "predicted_step_s": plan.predicted_step_s,
            "gain": 1.0 - plan.predicted_step_s / full_s,
            "ratios": [max(1.0 - rank.owned * (1.0 - rank.spared), 0.0) for rank in plan.ranks],
            "pruned": [rank.pruned for rank in plan.ranks],
            "lent": [rank.lent for rank in plan.ranks],
            "owned": [rank.owned for rank in plan.ranks],
        }
        for mode, plan in parts.decision.what_if_plans.items()
    }
