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
    from zeroresize.microbatch.cost_table import CostTable
    from zeroresize.microbatch.iteration_planner import IterationPlanner
    from zeroresize.microbatch.measured_table import measure_model
    from zeroresize.microbatch.padded import PaddedBatch, PairBatch
    from zeroresize.microbatch.profile import ProfiledShapes
    from zeroresize.microbatch.run_planners import RunPlanners
    from zeroresize.microbatch.shared_store import share_store
    from zeroresize.microbatch.trainer import IterationReport, MicroBatchTrainer
    from zeroresize.policy.microbatches.planning import plan_iteration
    from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
    from zeroresize.strategy.straggler_balancing import ChangeRecord

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

#: Everything is imported where it is asked for.
_MODULES = {
    "ChangeRecord": "zeroresize.strategy.straggler_balancing",
    "CostTable": "zeroresize.microbatch.cost_table",
    "DoesNotFitError": "zeroresize.policy.microbatches.planning_options",
    "IterationPlanner": "zeroresize.microbatch.iteration_planner",
    "IterationReport": "zeroresize.microbatch.trainer",
    "MicroBatchBalancer": "zeroresize.microbatch.balancer",
    "MicroBatchTrainer": "zeroresize.microbatch.trainer",
    "PaddedBatch": "zeroresize.microbatch.padded",
    "PairBatch": "zeroresize.microbatch.padded",
    "PlanningOptions": "zeroresize.policy.microbatches.planning_options",
    "ProfiledShapes": "zeroresize.microbatch.profile",
    "RunPlanners": "zeroresize.microbatch.run_planners",
    "measure_model": "zeroresize.microbatch.measured_table",
    "plan_iteration": "zeroresize.policy.microbatches.planning",
    "share_store": "zeroresize.microbatch.shared_store",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
