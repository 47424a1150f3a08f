"""What iterations take under other divisions of the ranks, some of them slow, with samples shared out anew.

Layers that move between stages and samples that move between replicas are so judged by one number, the seconds of an
iteration, by the cost model that plans are made with and the newest plans. A new plan may cut micro-batches anew, too,
so it is no longer than what is told here.

``R`` ranks, ``D`` replicas, ``S`` stages, ``L`` layers, ``M`` micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from zeroresize.plan.layout import Layout, TensorSpec, unit_bounds
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.policy.microbatches.costs import Prices, StageCosts
from zeroresize.policy.microbatches.plan import Floats, IterationPlan, MicroBatch, PlanningOptions, shapes_of
from zeroresize.policy.microbatches.planning import replica_plans, shared_by_stages
from zeroresize.policy.strategy.costs.cost_model import pipeline_seconds
from zeroresize.policy.strategy.stragglers.candidates import ModelDivision
from zeroresize.policy.strategy.switches.switch_plan import plan_weights

#: What the stages with these boundaries take, by what is computed again.
CostsOfStages = Callable[[Sequence[int]], Mapping[str, StageCosts]]


@dataclass(frozen=True)
class PlannedModel:
    """Describe what is trained in planned micro-batches."""

    original: Strategy  # how it is spread while no rank is slow; costs are known for its tensor-parallel degree only
    num_layers: int  # L
    tensors: Sequence[TensorSpec]  # of the undivided model
    nodes: Sequence[int]  # [R] on which node each rank is
    lengths: tuple[int, ...]  # [A] tokens of a usual sample, by which layers' work is told
    longest: tuple[int, ...]  # [A] tokens of the longest sample that may come
    optimizer_ratio: float = 2.0  # bytes of optimizer state for a byte of weights


class ReplannedCosts:
    """Tell what a training's iterations and switches take, as strategies' ``StrategyCosts`` of one range do.

    Options are those of planning while no rank is slow.
    """

    optimizer_strategy = 0

    def __init__(self, model: PlannedModel, costs_of: CostsOfStages, options: PlanningOptions) -> None:
        self._model, self._options = model, options
        self._costs_of = lru_cache(lambda boundaries: costs_of(boundaries))
        self._plans: tuple[IterationPlan, ...] = ()
        self._layout_of = lru_cache(self._layout)
        self._seconds_of = lru_cache(self._seconds)

    def expect(self, plans: Sequence[IterationPlan]) -> None:
        """Expect iterations like those of these plans, which were made for the strategy in force."""
        self._plans = tuple(plans)
        self._seconds_of.cache_clear()

    @property
    def division(self) -> ModelDivision:
        """Return how the model can be divided; a layer's work is what a usual sample takes."""
        costs, *_ = self._costs_of(tuple(range(self._model.num_layers + 1))).values()
        work_L = _alone(costs, self._model.lengths).seconds[0]
        unit_counts = sorted({tensor.num_units for tensor in self._model.tensors if tensor.division is not None})
        return ModelDivision(
            tuple(work_L.tolist()), tuple(unit_counts), tuple(self._model.nodes), (self._model.original.tp,)
        )

    def range_s(self, number: int, strategy: Strategy, speeds: Sequence[float]) -> float:
        """Return the mean seconds of the expected iterations, infinite for another tensor-parallel degree."""
        if strategy.tp != self._model.original.tp:
            return math.inf
        slowness_DS = self.slowness_of(strategy, speeds)
        return self._mean_s(strategy, slowness_DS, lambda _, stage_s: shared_by_stages(stage_s, slowness_DS))

    def as_planned_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the same of the plans as they are, made for this strategy's division, when ranks had other speeds."""

        def as_planned(plan: IterationPlan, _: Floats) -> list[range]:
            ends = itertools.accumulate((len(replica.microbatches) for replica in plan.replicas), initial=0)
            return list(itertools.starmap(range, itertools.pairwise(ends)))

        return self._mean_s(strategies[0], self.slowness_of(strategies[0], speeds), as_planned)

    def fits(self, number: int, strategy: Strategy, optimizer_strategy: Strategy) -> bool:
        """Return whether the newest micro-batches fit beside the weights that a strategy brings.

        So does the longest sample by itself, if the original strategy has room for it.
        """
        limit = self._memory_limit(strategy)
        if limit == math.inf or limit <= 0.0:
            return limit > 0.0
        if self._fits_longest(self._model.original) and not self._fits_longest(strategy):
            return False
        costs, options = self._costs(strategy), self.options_of(strategy)
        return all(
            replica_plans(_all_of(plan), costs[plan.recomputation], options, num_clusters=1) is not None
            for plan in self._plans
        )

    def switches_fit(self, strategies: Sequence[Strategy]) -> bool:
        """Return that they do: there is one range, so nothing switches within an iteration."""
        return True

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the mean seconds of the expected iterations."""
        return self.range_s(0, strategies[0], speeds)

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes of weights and optimizer state that the busiest rank sends or receives."""
        layouts = self._layout_of(before[0]), self._layout_of(after[0])
        plan = plan_weights(*layouts, self._model.tensors, self._model.nodes)
        return plan.most_bytes * (1.0 + self._model.optimizer_ratio)

    def slowness_of(self, strategy: Strategy, speeds: Sequence[float]) -> Floats:
        """Return [D, S] χ of each stage of each replica: of its slowest shard, by what of the work that has."""
        counts = [
            np.diff(unit_bounds(tensor.num_units, strategy.shares or (1.0,) * strategy.tp)) / tensor.num_units
            for tensor in self._model.tensors
            if tensor.division is not None
        ]
        parts = strategy.tp * np.mean(counts, axis=0) if counts else np.ones(strategy.tp)
        slowness_DS = np.empty((strategy.dp, strategy.pp))
        for replica, stage in np.ndindex(slowness_DS.shape):
            ranks = [strategy.rank_at(Position(replica, stage, shard)) for shard in range(strategy.tp)]
            slowness_DS[replica, stage] = (parts / np.asarray(speeds)[ranks]).max()
        return slowness_DS

    def options_of(self, strategy: Strategy, speeds: Sequence[float] | None = None) -> PlanningOptions:
        """Return how iterations are planned under a strategy: what more weights take of a rank, activations cannot."""
        slowness = () if speeds is None else tuple(map(tuple, self.slowness_of(strategy, speeds).tolist()))
        limit = self._memory_limit(strategy)
        return replace(self._options, num_replicas=strategy.dp, memory_limit=limit, slowness=slowness)

    def work_s(self, plan: IterationPlan, strategy: Strategy, rank: int) -> float:
        """Return the seconds that a rank should compute in an iteration if it is as fast as the costs say."""
        position = strategy.position_of(rank)
        if position is None or not plan.replicas[position.replica].microbatches:
            return 0.0
        shapes = shapes_of(plan.replicas[position.replica].microbatches)
        stage_s = self._costs(strategy)[plan.recomputation].prices(*shapes).seconds
        alone = [1.0 if other == rank else math.inf for other in range(len(self._model.nodes))]
        part = self.slowness_of(strategy, alone)[position.replica, position.stage]
        return float(stage_s[:, position.stage].sum() * part)

    def _fits_longest(self, strategy: Strategy) -> bool:
        limit = self._memory_limit(strategy)
        all_prices = [_alone(costs, self._model.longest) for costs in self._costs(strategy).values()]
        return any((prices.activation_bytes + prices.workspace_bytes).max() <= limit for prices in all_prices)

    def _mean_s(
        self,
        strategy: Strategy,
        slowness_DS: Floats,
        shared: Callable[[IterationPlan, Floats], Sequence[Sequence[int]]],
    ) -> float:
        """Of the expected iterations, whose micro-batches replicas share in a way; the slowest replica counts."""
        all_s = []
        for number, plan in enumerate(self._plans):
            stage_s = self._seconds_of(number, self._boundaries(strategy))
            shares = zip(shared(plan, stage_s), slowness_DS, strict=True)
            all_s.append(max(pipeline_seconds(stage_s[list(members)] * slowness_S) for members, slowness_S in shares))
        return math.fsum(all_s) / max(len(all_s), 1)

    def _seconds(self, number: int, boundaries: tuple[int, ...]) -> Floats:
        """[M, S] of the micro-batches of an expected plan."""
        plan = self._plans[number]
        return self._costs_of(boundaries)[plan.recomputation].prices(*shapes_of(_all_of(plan))).seconds

    def _costs(self, strategy: Strategy) -> Mapping[str, StageCosts]:
        return self._costs_of(self._boundaries(strategy))

    def _boundaries(self, strategy: Strategy) -> tuple[int, ...]:
        return strategy.partition(self._model.num_layers).boundaries

    def _layout(self, strategy: Strategy) -> Layout:
        return strategy.layout(self._model.tensors, len(self._model.nodes), self._model.num_layers)

    def _memory_limit(self, strategy: Strategy) -> float:
        """Weights, gradients and the optimizer's state of the rank with most leave so much."""
        held, original = (
            float(self._layout_of(each).rank_bytes(self._model.tensors).max())
            for each in (strategy, self._model.original)
        )
        return self._options.memory_limit - max(held - original, 0.0) * (2.0 + self._model.optimizer_ratio)


def _all_of(plan: IterationPlan) -> list[MicroBatch]:
    return [microbatch for replica in plan.replicas for microbatch in replica.microbatches]


def _alone(costs: StageCosts, lengths: tuple[int, ...]) -> Prices:
    """Of a micro-batch of one sample."""
    return costs.prices(np.ones(1, dtype=np.int64), np.array([lengths]))
