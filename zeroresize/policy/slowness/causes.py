"""Why a rank is slow, and what a division of the work by speed would bring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from zeroresize.policy.slowness.windows import StepWindow
from zeroresize.utils.usual import usual_of

#: "compute" stands for products and the rest together, where products were not timed.
Cause = Literal["products", "rest", "loader", "compute"]


def usual_window(windows: Sequence[StepWindow]) -> StepWindow:
    """Return what is usual among windows of one rank."""
    timed = [window.products_s for window in windows if not math.isnan(window.products_s)]
    return StepWindow(
        end_step=windows[-1].end_step,
        num_steps=windows[-1].num_steps,
        busy_s=usual_of([window.busy_s for window in windows]),
        step_s=usual_of([window.step_s for window in windows]),
        loader_s=usual_of([window.loader_s for window in windows]),
        products_s=usual_of(timed) if timed else math.nan,
    )


def shares_of_causes(slow: StepWindow, others: Sequence[StepWindow]) -> dict[Cause, float]:
    """Return which share of a rank's delay comes from which part of its step.

    Args:
        slow: the usual window of the slow rank.
        others: those of the others; parts are compared with what is usual among them.

    Returns:
        Shares that add up to 1; a part in which the rank is not slower has none. Empty where it is not slower at all.
    """
    loader_s = slow.loader_s - usual_of([other.loader_s for other in others])
    compute_s = slow.busy_s - slow.loader_s - usual_of([other.busy_s - other.loader_s for other in others])
    delays: dict[Cause, float] = {"loader": loader_s}
    if math.isnan(slow.products_s) or any(math.isnan(other.products_s) for other in others):
        delays["compute"] = compute_s
    else:
        products_s = slow.products_s - usual_of([other.products_s for other in others])
        delays |= {"products": products_s, "rest": compute_s - products_s}
    positive: dict[Cause, float] = {cause: seconds for cause, seconds in delays.items() if seconds > 0.0}
    total_s = math.fsum(positive.values())
    return {cause: seconds / total_s for cause, seconds in positive.items()}


def main_cause(shares: Mapping[Cause, float]) -> Cause:
    """Return the part that most of the delay comes from."""
    return max(shares, key=lambda cause: shares[cause], default="compute")


def share_saved(windows: Sequence[StepWindow]) -> float:
    """Return which share of a step is saved at most if work is divided by the ranks' speeds.

    What a rank does before its forward stays where it is. The rest, c seconds of rank i, is divided so that all ranks
    end together, at T with Σ (T − loader_i) / c_i = R. Whether work can be divided at all is not asked.

    Args:
        windows: [R], the usual one of every rank.
    """
    computing_s = [max(window.busy_s - window.loader_s, 1e-9) for window in windows]
    weights = [1.0 / seconds for seconds in computing_s]
    loaded = math.fsum(weight * window.loader_s for weight, window in zip(weights, windows, strict=True))
    balanced_s = (len(windows) + loaded) / math.fsum(weights)
    balanced_s = max(balanced_s, *(window.loader_s for window in windows))
    longest_s = max(window.busy_s for window in windows)
    step_s = max(longest_s, *(window.step_s for window in windows))
    return max(longest_s - balanced_s, 0.0) / step_s
