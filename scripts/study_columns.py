"""Which column of a study's table tells the step time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def step_time(rows: Collection[Mapping[str, Any]]) -> tuple[str, str]:
    """The column that tells the step time of all of ``rows`` alike, and what it is.

    The mean, which counts what an epoch takes. Rows of older runs know the median only: beside them it stands for all.
    """
    if all(row.get("mean_step_ms") or not row.get("step_ms") for row in rows):
        return "mean_step_ms", "mean step"
    return "step_ms", "median step"
