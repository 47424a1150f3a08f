"""What steps and switches take while some ranks are slow, by the model of costs and the newest mini-batches.

``G`` ranges of lengths, ``R`` ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from zeroresize.plan.layout import unit_bounds
from zeroresize.plan.length_range import LengthRange, lengths_by_range
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.forecast import packed_by_work
from zeroresize.policy.strategy.costs.layer_cost_table import LayerCost, LayerCostTable
from zeroresize.policy.strategy.costs.planned_switches import most_bytes_of
from zeroresize.policy.strategy.stragglers.candidates import ModelDivision
from zeroresize.policy.strategy.switches.switch_order import cheapest_order, tour_seconds

#: Of the heaviest layer's work, at least.
_LEAST_WORK = 1e-6


class StragglerCosts:
    """Tell what a training's steps and switches take.

    It is a :class:`~zeroresize.policy.strategy.stragglers.candidates.StrategyCosts`.

    Args:
        cost: of the model and the cluster; whether ranks are slow there does not count.
        ranges: of lengths, [G], all of them with ``max_tokens``, as a trainer's are.
        optimizer_strategy: the number of the range under whose strategy the optimizer steps.
        limit_bytes: memory of a rank; infinite where that is no question. The ranges' own strategies are known to fit.
    """

    def __init__(
        self,
        cost: CostModel,
        ranges: Sequence[LengthRange],
        *,
        optimizer_strategy: int,
        limit_bytes: float = math.inf,
    ) -> None:
        most_tp = min((one.num_units for one in cost.tensors if one.division is not None), default=1)
        self._cost = replace(cost, layers=of_all_degrees(cost.layers, most_tp), slowness=())
        self._ranges, self.optimizer_strategy = tuple(ranges), optimizer_strategy
        self._originals = tuple(one.strategy for one in self._ranges)
        self._degrees = cost.layers.degrees
        self._max_tokens = [one.max_tokens or one.up_to for one in ranges]
        self._limit_bytes = limit_bytes
        self._sample: list[list[list[int]]] = []
        self._at, self._packed = lru_cache(maxsize=1)(self._slowed), lru_cache(maxsize=None)(self._packs)
        self._in_units = lru_cache(maxsize=None)(self._with_unit_shares)
        self._bytes_of_units: Counter[int] = Counter()
        for tensor in cost.tensors:
            if tensor.division is not None:
                self._bytes_of_units[tensor.num_units] += tensor.num_bytes

    @property
    def division(self) -> ModelDivision:
        """Return how the model can be divided; a layer's work is that of a token."""
        layers, tensors = self._cost.layers, self._cost.tensors
        token_s = [layers.costs[kind][1].token_s for kind in layers.kinds]
        least_s = _LEAST_WORK * max(token_s) or 1.0  # layers that cost nothing need a stage, too
        work = tuple(max(one, least_s) for one in token_s)
        unit_counts = tuple(sorted({one.num_units for one in tensors if one.division is not None}))
        return ModelDivision(work, unit_counts, self._cost.nodes, tuple(self._degrees))

    def expect(self, sample: Sequence[Sequence[int]]) -> None:
        """Expect steps like these: the lengths of the sequences of some mini-batches.

        Raises:
            ValueError: for a sequence that is longer than every range allows.
        """
        self._sample = [lengths_by_range(self._ranges, lengths) for lengths in sample]
        # Strategies that were thought of since are many; layouts and plans of those that are still are made again.
        self._cost = replace(self._cost)
        for cached in (self._at, self._packed, self._in_units):
            cached.cache_clear()

    def range_s(self, number: int, strategy: Strategy, speeds: Sequence[float]) -> float:
        """Return the mean seconds of range ``number`` in the expected steps; infinite where it is out of the question.

        Infinite where a tensor-parallel group is on more nodes than it needs.
        """
        if strategy != self._originals[number] and self._leaves_nodes(strategy):
            return math.inf
        slow, packed, in_units = self._at(tuple(speeds)), self._packed(number, strategy.dp), self._in_units(strategy)
        return math.fsum(slow.work_seconds(in_units, replicas) for replicas in packed) / max(len(packed), 1)

    def fits(self, number: int, strategy: Strategy, optimizer_strategy: Strategy) -> bool:
        """Return whether the memory of all ranks suffices for a range's strategy beside an optimizer's strategy."""
        # The caller trains with the original ones.
        is_known_to_fit = (strategy, optimizer_strategy) == (
            self._originals[number],
            self._originals[self.optimizer_strategy],
        )
        return is_known_to_fit or self._cost.fits(
            strategy, optimizer_strategy, self._max_tokens[number], self._limit_bytes
        )

    def switches_fit(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether memory suffices for the switches of a step, in whatever order the strategies are visited."""
        different = list(dict.fromkeys([strategies[self.optimizer_strategy], *strategies]))
        known = set(self._originals) if different[0] == self._originals[self.optimizer_strategy] else set()
        fit = self._cost.switches_fit(different, 0, self._limit_bytes)
        return all(
            fit[before, after] or {different[before], different[after]} <= known
            for before, after in itertools.permutations(range(len(different)), 2)
        )

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the mean seconds of the expected steps: work, switches, and the sum of the gradients."""
        work_s = math.fsum(self.range_s(number, one, speeds) for number, one in enumerate(strategies))
        optimizer_strategy = strategies[self.optimizer_strategy]
        different = list(dict.fromkeys([optimizer_strategy, *strategies]))
        switches = self._cost.switch_seconds(different, 0)
        tour_s = tour_seconds(switches, cheapest_order(switches, 0))
        return work_s + tour_s + self._cost.reduction_seconds(optimizer_strategy)

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes that the busiest rank sends or receives as the optimizer moves: weights and its state.

        Gradients are none between two steps, and strategies that are not the optimizer's hold nothing then.
        """
        old_strategy, new_strategy = before[self.optimizer_strategy], after[self.optimizer_strategy]
        return most_bytes_of(self._cost.weight_plan(old_strategy, new_strategy)) * (1.0 + self._cost.optimizer_ratio)

    def rank_s(self, strategies: Sequence[Strategy], lengths: Sequence[int], rank: int) -> float:
        """Return the seconds that a rank should compute in a step with sequences of these lengths.

        It is taken not to be slow.
        """
        groups, total_s = lengths_by_range(self._ranges, lengths), 0.0
        for number, (strategy, group) in enumerate(zip(strategies, groups, strict=True)):
            position = strategy.position_of(rank)
            if position is None or not group:
                continue
            cost = self._cost.stage_costs(strategy)[position.stage]
            shares = self._in_units(strategy).shares
            share = shares[position.shard] if shares else 1.0
            micro_batches = packed_by_work(group, self._max_tokens[number], strategy.dp)[position.replica]
            total_s += share * math.fsum(cost.seconds(sum(one), sum(n * n for n in one)) for one in micro_batches)
        return total_s

    def _with_unit_shares(self, strategy: Strategy) -> Strategy:
        """The same with the shares that whole units come to, the mean of all divided tensors by their bytes."""
        total, shares = sum(self._bytes_of_units.values()), np.zeros(strategy.tp)
        for num_units, num_bytes in self._bytes_of_units.items():
            counts = np.diff(unit_bounds(num_units, strategy.shares or (1.0,) * strategy.tp))
            shares += strategy.tp * counts / num_units * num_bytes / total
        return replace(strategy, shares=tuple(shares.tolist())) if total else strategy

    def _leaves_nodes(self, strategy: Strategy) -> bool:
        """Whether a tensor-parallel group is on more nodes than it needs: layers have no costs for that."""
        nodes = self._cost.nodes
        largest = max(Counter(nodes).values())
        needed = math.ceil(strategy.tp / largest)
        return any(len({nodes[rank] for rank in group}) > needed for group in strategy.tp_groups())

    def _slowed(self, speeds: tuple[float, ...]) -> CostModel:
        return replace(self._cost, slowness=tuple(1.0 / speed for speed in speeds))

    def _packs(self, number: int, dp: int) -> list[list[list[list[int]]]]:
        groups = [lengths[number] for lengths in self._sample]
        return [packed_by_work(group, self._max_tokens[number], dp) for group in groups if group]


def of_all_degrees(layers: LayerCostTable, most: int) -> LayerCostTable:
    """Return the table with costs for every tensor-parallel degree up to the most, as uneven groups have odd ones.

    Those that are missing lie on a line over 1 / tp between their neighbours, or are as at the last that is known.
    """
    known = layers.degrees

    def cost(by_degree: dict[int, LayerCost], tp: int) -> LayerCost:
        below = max((one for one in known if one <= tp), default=known[0])
        above = min((one for one in known if one >= tp), default=known[-1])
        part = 0.0 if below == above else (1.0 / below - 1.0 / tp) / (1.0 / below - 1.0 / above)
        low, high = by_degree[below], by_degree[above]
        keys = ("fixed_s", "token_s", "square_s", "token_bytes")
        return LayerCost(*(getattr(low, key) + part * (getattr(high, key) - getattr(low, key)) for key in keys))

    degrees = range(1, max(most, *known) + 1)
    costs = {kind: {tp: cost(dict(own), tp) for tp in degrees} for kind, own in layers.costs.items()}
    return replace(layers, costs=costs)
