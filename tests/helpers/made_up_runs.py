"""Folders of runs that never ran, for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroresize.telemetry import JsonLinesTelemetry, UpdateRecord

LAYERS = ("fc1", "fc2")


def record(rank: int, update: int, ratio: float, **changes: Any) -> UpdateRecord:
    """One of an update every ten steps, at which ``ratio`` is pruned from now on; the first has measured nothing."""
    values = {
        "update": update,
        "step": 10 * update,
        "epoch": 0,
        "rank": rank,
        "busy_s": float("nan") if update == 1 else 0.2,
        "gemm_s": float("nan") if update == 1 else 0.1,
        "is_straggler": ratio > 0,
        "ratio": ratio,
        "pruned": ratio,
        "lent": 0.0,
        "borrowed": 0.0,
        "owned": 1.0,
        "units": {},
        "lent_to": {},
        "layer_shares": dict.fromkeys(LAYERS, ratio),
        "predicted_step_s": 0.2,
        "calibration_steps": 0,
        "balancing_since_update_s": 0.05,
    }
    return UpdateRecord(**{**values, **changes})


def write_records(folder: Path, rank: int, records: Sequence[UpdateRecord]) -> None:
    write = JsonLinesTelemetry(folder / f"balance-rank{rank}.jsonl")
    for one in records:
        write(one)
    write.close()


def write_metrics(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def epoch_of(seconds: Sequence[float], *, begin: int = 0, from_step: int = 0) -> dict[str, Any]:
    """An epoch's line: how long each of its steps took."""
    step = begin + len(seconds) - 1
    return {"kind": "epoch", "epoch": 0, "step": step, "from_step": from_step, "ratios": [], "seconds": list(seconds)}


def write_run(
    folder: Path,
    mode: str,
    seconds: Sequence[float],
    slow: Sequence[UpdateRecord] = (),
    *,
    summary: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """A run of two ranks in one epoch; the records of rank 1 are ``slow``, rank 0 does nothing but train."""
    folder.mkdir(parents=True, exist_ok=True)
    write_metrics(folder, [epoch_of(seconds)])
    slow = slow or [record(1, update, 0.0, busy_s=0.4) for update in range(1, len(seconds) // 10 + 1)]
    write_records(folder, 0, [record(0, one.update, 0.0, busy_s=0.1) for one in slow])
    write_records(folder, 1, slow)
    config = {"balance": {"mode": mode}, "output": {"settle_steps": 5}, **sections}
    (folder / "config.json").write_text(json.dumps({**config, "total_steps": len(seconds)}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({**summary, "config": config}))
    return folder
