"""What a balancer tells of itself: a record an update, flat numbers at any time, and what other modes would do."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict
from typing import Any

from zeroresize.control.assembly import Parts
from zeroresize.control.slowness_watch import status_of_watch, statuses_of
from zeroresize.policy.tensor.what_if import verdict_on
from zeroresize.status import Status
from zeroresize.telemetry import UpdateRecord

_RECORDED_METRICS = ("ratio", "busy_s", "gemm_s", "predicted_step_s", "bound_s", "products_bound_s", "moving_rest")


def update_record(parts: Parts, num_steps: int) -> UpdateRecord:
    """Return this rank's numbers after ``num_steps`` steps."""
    times, decider, in_force = parts.observer.monitor.times, parts.decider, parts.mover.plans
    plan, units, bounds, rank = decider.plan, parts.group.units, decider.controller.bounds, parts.setup.rank
    moves = units.moves if units is not None else []
    return UpdateRecord(
        verdict=decider.controller.verdict,
        update=num_steps // parts.setup.config.update_every,
        step=num_steps,
        epoch=parts.mover.selector.state.epoch,
        rank=rank,
        busy_s=times.busy_s + times.outside_s if times else math.nan,
        gemm_s=times.gemm_s if times else math.nan,
        is_straggler=plan.ranks[rank].is_straggler,
        ratio=in_force.ratio,
        **asdict(in_force.planned),
        units={kind: of_ranks[rank] for kind, of_ranks in units.num_units.items()} if units is not None else {},
        moved_bytes=sum(move.sent_bytes + move.received_bytes for move in moves),
        moving_s=sum(move.seconds for move in moves),
        lent_to={str(receiver): share for receiver, share in in_force.lent_to.items()},
        layer_shares=in_force.layer_shares,
        predicted_step_s=plan.predicted_step_s,
        bound_s=bounds.of_units if bounds is not None else math.nan,
        products_bound_s=bounds.of_products if bounds is not None else math.nan,
        moving_rest=times.moving_rest if times else math.nan,
        calibration_steps=decider.num_calibration_steps,
        balancing_since_update_s=parts.observer.balancing_since_update_s,
        would={
            mode: {
                "predicted_step_s": prediction["predicted_step_s"],
                "gain": prediction["gain"],
                "most_ratio": max(prediction["ratios"]),
            }
            for mode, prediction in what_if(parts).items()
        },
    )


def metrics(parts: Parts, num_steps: int) -> dict[str, float]:
    """Return what :meth:`zeroresize.balancer.Balancer.metrics` tells."""
    record, observer, mover, units = update_record(parts, num_steps), parts.observer, parts.mover, parts.group.units
    times, memory = observer.monitor.times, parts.decider.memory
    executed = mover.plans.shares_of_last_step or mover.plans.shares_of_step
    numbers = {name: float(getattr(record, name)) for name in (*_RECORDED_METRICS, "is_straggler")} | {
        **{f"{name}_share": share for name, share in asdict(executed).items()},
        "group_pruned": statistics.fmean(rank.pruned * rank.owned for rank in parts.decider.plan.ranks),
        "relieved": 1.0 - record.owned * (1.0 - record.ratio),
        "least_busy_s": times.least_busy_s + times.outside_s if times else math.nan,
        "balancing_s": observer.balancing_s,
        "statistic_bytes": float(observer.statistic.bytes_held if observer.statistic is not None else 0),
        "migration_bytes": float(mover.lender.bytes_held if mover.lender is not None else 0),
    }
    if memory is not None and units is not None:
        numbers["memory_bytes"] = memory.bytes_by(units.shares)[parts.setup.rank]
    numbers |= {f"would/{mode}/{name}": value for mode, own in record.would.items() for name, value in own.items()}
    watched = observer.slowness.metrics() if observer.slowness is not None else {}
    return {f"balance/{name}": value for name, value in numbers.items()} | watched


def what_if(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return what :meth:`zeroresize.balancer.Balancer.what_if` tells."""
    decider, what_if, mode = parts.decider, parts.decider.what_if, parts.setup.config.mode
    plans, verdicts, full_s = what_if.plans, what_if.verdicts, decider.plan.predicted_step_s
    if mode != "off" and decider.restraint.state == "advice":
        plans, verdicts = {mode: decider.decided}, {mode: verdict_on(decider.controller, decider.decided)}
    return {
        mode: {
            "predicted_step_s": plan.predicted_step_s,
            "gain": 1.0 - plan.predicted_step_s / full_s,
            "ratios": [max(1.0 - rank.owned * (1.0 - rank.spared), 0.0) for rank in plan.ranks],
            "pruned": [rank.pruned for rank in plan.ranks],
            "lent": [rank.lent for rank in plan.ranks],
            "owned": [rank.owned for rank in plan.ranks],
            "verdict": verdicts[mode],
        }
        for mode, plan in plans.items()
    }


def status(parts: Parts, num_steps: int, state: str) -> Status:
    """Return what :meth:`zeroresize.balancer.Balancer.status` tells."""
    decider, slowness = parts.decider, parts.observer.slowness
    if slowness is not None:  # in mode "off"
        return status_of_watch(slowness.report(), state)
    shares = [rank.owned * (1.0 - rank.spared) + rank.borrowed for rank in decider.plan.ranks]
    report = decider.slowness.report()
    verdict = decider.controller.verdict if parts.setup.num_ranks > 1 else "the group has no other rank"
    relief = decider.plan.description if decider.plan.relieved else ""
    return Status(
        kind="units",
        state=state,
        step=num_steps,
        time=time.time(),
        step_s=parts.observer.monitor.step_s,
        expected_step_s=decider.controller.predict_step_s(decider.plan),
        even_step_s=decider.even_step_s,
        saved_s=decider.saved_s,
        cost_s=report.cost_s,
        ranks=statuses_of(report, shares),
        decided="; ".join(filter(None, (relief, verdict))),
    )
