"""Micro-batches of samples of very different lengths, planned ahead (DynaPipe, EuroSys '24).

- :class:`RunPlanners` plan iterations in processes of their own, by an :class:`IterationPlanner`: what is known of the
  samples' lengths, of costs (:func:`measure_model`), and :class:`PlanningOptions`.
- :class:`MicroBatchTrainer` carries plans out, :class:`MicroBatchBalancer` beside it for slow ranks.
- :func:`share_store` makes the store by which plans come from planners to ranks.
- :class:`PaddedBatch` and :class:`PairBatch` are micro-batches of decoder-only and of encoder-decoder models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroresize.microbatch.balancer import MicroBatchBalancer
    from zeroresize.microbatch.measuring import ProfiledShapes, measure_model
    from zeroresize.microbatch.padded import PaddedBatch, PairBatch
    from zeroresize.microbatch.planners import RunPlanners
    from zeroresize.microbatch.planning_process import IterationPlanner
    from zeroresize.microbatch.store import share_store
    from zeroresize.microbatch.trainer import IterationReport, MicroBatchTrainer
    from zeroresize.policy.microbatches.costs import CostTable
    from zeroresize.policy.microbatches.plan import DoesNotFitError, PlanningOptions
    from zeroresize.policy.microbatches.planning import plan_iteration
    from zeroresize.telemetry import ChangeRecord

__all__ = [
    "ChangeRecord",
    "CostTable",
    "DoesNotFitError",
    "IterationPlanner",
    "IterationReport",
    "MicroBatchBalancer",
    "MicroBatchTrainer",
    "PaddedBatch",
    "PairBatch",
    "PlanningOptions",
    "ProfiledShapes",
    "RunPlanners",
    "measure_model",
    "plan_iteration",
    "share_store",
]

#: Everything is imported where it is asked for: planner processes need little of it.
_NAMES = {
    "zeroresize.microbatch.balancer": ("MicroBatchBalancer",),
    "zeroresize.microbatch.measuring": ("ProfiledShapes", "measure_model"),
    "zeroresize.microbatch.padded": ("PaddedBatch", "PairBatch"),
    "zeroresize.microbatch.planners": ("RunPlanners",),
    "zeroresize.microbatch.planning_process": ("IterationPlanner",),
    "zeroresize.microbatch.store": ("share_store",),
    "zeroresize.microbatch.trainer": ("IterationReport", "MicroBatchTrainer"),
    "zeroresize.policy.microbatches.costs": ("CostTable",),
    "zeroresize.policy.microbatches.plan": ("DoesNotFitError", "PlanningOptions"),
    "zeroresize.policy.microbatches.planning": ("plan_iteration",),
    "zeroresize.telemetry": ("ChangeRecord",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
