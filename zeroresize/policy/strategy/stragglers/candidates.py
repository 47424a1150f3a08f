"""What strategies could become while some ranks are slow, and what steps and switches take then.

Strategies shrink, their ranks change places, or the slowest ranks are left out. Pure: the same speeds give the same
candidates on every rank. ``R`` ranks of the job, ``L`` layers, ``G`` ranges of lengths, each with a strategy.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from zeroresize.plan.layout import unit_bounds
from zeroresize.plan.strategy import LengthRange, Strategy, lengths_by_range
from zeroresize.policy import ROUNDING
from zeroresize.policy.pipeline.division import PipelineLoad, balanced_partition
from zeroresize.policy.speed.noise import ALIKE
from zeroresize.policy.strategy.costs.cost_model import CostModel, LayerCostTable
from zeroresize.policy.strategy.packing import Floats, packed_sums
from zeroresize.policy.strategy.switches.switch_order import cheapest_order, tour_seconds

#: "stay": as it is; "replan": planned anew for the speeds that ranks have; "shares": units move within tensor-parallel
#: groups; "rearrange": ranks change places, layers stages; "leave out": the slowest ranks do nothing; "original": as
#: the caller gave the strategies.
Kind = Literal["stay", "replan", "shares", "rearrange", "leave out", "original"]
#: Groups of up to so many ranks may go on with one rank less; larger ones become as small as degrees that are known.
_SMALL_GROUP = 4


@dataclass(frozen=True)
class ModelDivision:
    """Describe how a model can be divided.

    Attributes:
        layer_work: [L] of each layer, in any unit, such as seconds.
        unit_counts: of its segments, such as heads and neurons: each shard needs one of each.
        nodes: [R] on which node each rank is, so that tensor-parallel groups stay within nodes; empty for one node.
        degrees: tensor-parallel ones whose costs are known; empty for the powers of two.
    """

    layer_work: tuple[float, ...]
    unit_counts: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = ROUNDING * max(self.layer_work) or 1.0  # layers that cost nothing need a stage, too
        object.__setattr__(self, "layer_work", tuple(max(work, least) for work in self.layer_work))


@dataclass(frozen=True)
class Candidate:
    """Describe strategies of all ranges [G] that may be put in force together."""

    kind: Kind
    left_out: tuple[int, ...]  # the slow ranks that get no part in any strategy, rising
    strategies: tuple[Strategy, ...]

    @property
    def key(self) -> str:
        """Return what is the same for all that is done with the same ranks, whatever their shares are just now."""
        return f"{self.kind} {' '.join(map(str, self.left_out))}".strip()


class StrategyCosts(Protocol):
    """Tell what steps and switches take; the optimizer steps under the strategy of range ``optimizer_strategy``."""

    optimizer_strategy: int

    def range_s(self, number: int, strategy: Strategy, speeds: Sequence[float]) -> float:
        """Return the seconds of a range where rank r is ``speeds[r]`` times as fast as costs say; infinite: never."""

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the seconds of a step under these strategies, one of each range, with the switches in it."""

    def fits(self, number: int, strategy: Strategy, optimizer_strategy: Strategy) -> bool:
        """Whether memory suffices to train range ``number`` under a strategy with the optimizer in this one."""

    def switches_fit(self, strategies: Sequence[Strategy]) -> bool:
        """Whether memory suffices for the switches between the strategies of all ranges."""

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes of the busiest rank when the optimizer's strategy becomes another; 0 where it does not."""


class StragglerCosts:
    """Tell what a training's steps and switches take, by the model of costs and the newest mini-batches.

    Whether ranks are slow in that model does not count. The strategies of the ranges [G], all with ``max_tokens``, are
    known to fit; the optimizer steps under that of range ``optimizer_strategy``.

    Attributes:
        division: how the model can be divided; a layer's work is that of a token.
    """

    def __init__(
        self,
        cost: CostModel,
        ranges: Sequence[LengthRange],
        *,
        optimizer_strategy: int,
        limit_bytes: float = math.inf,
    ) -> None:
        divided = [tensor for tensor in cost.tensors if tensor.division is not None]
        most_tp = min((tensor.num_units for tensor in divided), default=1)
        self._cost = replace(cost, layers=of_all_degrees(cost.layers, most_tp), slowness=())
        self._ranges, self.optimizer_strategy, self._limit_bytes = tuple(ranges), optimizer_strategy, limit_bytes
        self._originals = tuple(each.strategy for each in ranges)
        self._max_tokens = [each.max_tokens or each.up_to for each in ranges]
        self._sample: list[list[list[int]]] = []
        self._at, self._packed = lru_cache(maxsize=1)(self._slowed), lru_cache(maxsize=None)(self._packs)
        self._in_units = lru_cache(maxsize=None)(self._with_unit_shares)
        self._bytes_of_units: Counter[int] = Counter()
        for tensor in divided:
            self._bytes_of_units[tensor.num_units] += tensor.num_bytes
        layers = self._cost.layers
        work = tuple(layers.costs[kind][1].token_s for kind in layers.kinds)
        self.division = ModelDivision(work, tuple(sorted(self._bytes_of_units)), cost.nodes, cost.layers.degrees)

    def expect(self, sample: Sequence[Sequence[int]]) -> None:
        """Expect steps like these: the lengths of the sequences of some mini-batches."""
        self._sample = [lengths_by_range(self._ranges, lengths) for lengths in sample]
        # Strategies that were thought of since are many; layouts and plans of those that are still are made again.
        self._cost = replace(self._cost)
        for cached in (self._at, self._packed, self._in_units):
            cached.cache_clear()

    def range_s(self, number: int, strategy: Strategy, speeds: Sequence[float]) -> float:
        """Return the mean seconds of range ``number`` in the expected steps."""
        nodes = self._cost.nodes
        needed = math.ceil(strategy.tp / max(Counter(nodes).values()))
        groups = strategy.tp_groups() if strategy != self._originals[number] else []
        if any(len({nodes[rank] for rank in group}) > needed for group in groups):
            return math.inf  # layers have no costs for a group on more nodes than it needs
        slow, packed, in_units = self._at(tuple(speeds)), self._packed(number, strategy.dp), self._in_units(strategy)
        return math.fsum(slow.work_seconds(in_units, replicas) for replicas in packed) / max(len(packed), 1)

    def fits(self, number: int, strategy: Strategy, optimizer_strategy: Strategy) -> bool:
        """Return whether the memory of all ranks suffices for a range's strategy beside an optimizer's strategy."""
        if (strategy, optimizer_strategy) == (self._originals[number], self._originals[self.optimizer_strategy]):
            return True  # the caller trains so
        return self._cost.fits(strategy, optimizer_strategy, self._max_tokens[number], self._limit_bytes)

    def switches_fit(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether memory suffices for the switches of a step, in whatever order the strategies are visited."""
        different = list(dict.fromkeys([strategies[self.optimizer_strategy], *strategies]))
        known = set(self._originals) if different[0] == self._originals[self.optimizer_strategy] else set()
        fit = self._cost.switches_fit(different, 0, self._limit_bytes)
        pairs = itertools.permutations(range(len(different)), 2)
        return all(fit[pair] or {different[end] for end in pair} <= known for pair in pairs)

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the mean seconds of the expected steps: work, switches, and the sum of the gradients."""
        work_s = math.fsum(self.range_s(number, strategy, speeds) for number, strategy in enumerate(strategies))
        optimizer_strategy = strategies[self.optimizer_strategy]
        switches = self._cost.switches.seconds(list(dict.fromkeys([optimizer_strategy, *strategies])), 0)
        tour_s = tour_seconds(switches, cheapest_order(switches, 0))
        return work_s + tour_s + self._cost.reduction_seconds(optimizer_strategy)

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes of the busiest rank as the optimizer moves: weights and its state, without gradients."""
        plan = self._cost.switches.weights(before[self.optimizer_strategy], after[self.optimizer_strategy])
        return plan.most_bytes * (1.0 + self._cost.optimizer_ratio)

    def rank_s(self, strategies: Sequence[Strategy], lengths: Sequence[int], rank: int) -> float:
        """Return the seconds that a rank that is not slow computes in a step with sequences of these lengths."""
        total_s = 0.0
        for number, group in enumerate(lengths_by_range(self._ranges, lengths)):
            strategy = strategies[number]
            position = strategy.position_of(rank)
            if position is None or not group:
                continue
            cost = self._cost.stage_costs(strategy)[position.stage]
            shares = self._in_units(strategy).shares
            sums = packed_sums(group, self._max_tokens[number], strategy.dp)[position.replica]
            seconds = cost.fixed_s + sums @ np.array([cost.token_s, cost.square_s])
            total_s += (shares[position.shard] if shares else 1.0) * float(seconds.sum())
        return total_s

    def _with_unit_shares(self, strategy: Strategy) -> Strategy:
        """The same with the shares that whole units come to, the mean of all divided tensors by their bytes."""
        total, shares = sum(self._bytes_of_units.values()), np.zeros(strategy.tp)
        for num_units, num_bytes in self._bytes_of_units.items():
            counts = np.diff(unit_bounds(num_units, strategy.shares or (1.0,) * strategy.tp))
            shares += strategy.tp * counts / num_units * num_bytes / total
        return replace(strategy, shares=tuple(shares.tolist())) if total else strategy

    def _slowed(self, speeds: tuple[float, ...]) -> CostModel:
        return replace(self._cost, slowness=tuple(1.0 / speed for speed in speeds))

    def _packs(self, number: int, dp: int) -> list[list[Floats]]:
        groups = [lengths[number] for lengths in self._sample]
        return [packed_sums(group, self._max_tokens[number], dp) for group in groups if group]


def of_all_degrees(layers: LayerCostTable, most: int) -> LayerCostTable:
    """Return the table with costs for every tensor-parallel degree up to the most, as uneven groups have odd ones.

    Those that are missing lie on a line over 1 / tp between their neighbours, or are as at the last that is known.
    """
    known, costs = layers.degrees, {kind: dict(by_degree) for kind, by_degree in layers.costs.items()}
    for tp in sorted({*range(1, max(most, *known) + 1)} - {*known}):
        below = max((degree for degree in known if degree < tp), default=known[0])
        above = min((degree for degree in known if degree > tp), default=known[-1])
        part = 0.0 if below == above else (1.0 / below - 1.0 / tp) / (1.0 / below - 1.0 / above)
        for by_degree in costs.values():
            by_degree[tp] = by_degree[below].mixed(by_degree[above], part)
    return replace(layers, costs=costs)


def candidates(
    original: Sequence[Strategy],
    in_force: Sequence[Strategy],
    speeds: Sequence[float],
    model: ModelDivision,
    costs: StrategyCosts,
) -> list[Candidate]:
    """Return what could be in force now, of each kind the best for each range; "stay" is the first.

    While all ranks are about equally fast these are to stay and to go back.
    """
    taken = {rank for strategy in in_force for rank in strategy.ranks}
    idle = tuple(rank for rank in range(len(speeds)) if rank not in taken)
    offered = [Candidate("stay", idle, tuple(in_force)), Candidate("original", (), tuple(original))]
    slow = slow_ranks(original, speeds)
    if slow:
        by_speed = (_shares(each.degrees, each.ranks, speeds, model, by_speed=True) for each in original)
        shares = [{each, replace(each, shares=of_each)} for each, of_each in zip(original, by_speed, strict=True)]
        rearranged = [{each} | arrangements(each.degrees, each.ranks, speeds, model) for each in original]
        offered += _best("shares", (), shares, speeds, costs) + _best("rearrange", (), rearranged, speeds, costs)
    for size in range(1, min(len(slow), len(speeds) // 2) + 1):
        left_out, smaller = tuple(sorted(slow[:size])), []
        for strategy in original:
            rest = [rank for rank in strategy.ranks if rank not in left_out]
            degrees = smaller_degrees(strategy.degrees, len(rest), model)
            smaller.append(set[Strategy]().union(*(arrangements(each, rest, speeds, model) for each in degrees)))
        offered += _best("leave out", left_out, smaller, speeds, costs)
    first: dict[tuple[Strategy, ...], Candidate] = {}
    for candidate in offered:
        first.setdefault(candidate.strategies, candidate)
    return list(first.values())


def slow_ranks(strategies: Sequence[Strategy], speeds: Sequence[float]) -> list[int]:
    """Return the ranks with a part in the strategies that are not about as fast as the fastest, slowest first."""
    ranks = sorted({rank for strategy in strategies for rank in strategy.ranks})
    fastest = max(speeds[rank] for rank in ranks)
    return sorted((rank for rank in ranks if speeds[rank] < (1.0 - ALIKE) * fastest), key=lambda rank: speeds[rank])


def smaller_degrees(degrees: tuple[int, int, int], num_ranks: int, model: ModelDivision) -> list[tuple[int, int, int]]:
    """Return the same (dp, tp, pp), or next smaller groups and pipelines, with as many replicas as there are ranks for.

    What fewer ranks do stays like what all did: whether others are better whoever is slow is a search's matter.
    """
    _, tp, pp = degrees
    return [
        (num_ranks // (shards * stages), shards, stages)
        for shards, stages in itertools.product(_next_smaller(tp, model.degrees), _next_smaller(pp))
        if shards * stages <= num_ranks
    ]


def _next_smaller(degree: int, known: Sequence[int] = ()) -> list[int]:
    """Itself, the next smaller known one or power of two and, of a small one, one less."""
    known = known or [2**power for power in range(degree.bit_length())]
    degrees = {degree, max((smaller for smaller in known if smaller < degree), default=degree)}
    return sorted(degrees | ({max(degree - 1, 1)} if degree <= _SMALL_GROUP else set()))


def arrangements(
    degrees: tuple[int, int, int], ranks: Sequence[int], speeds: Sequence[float], model: ModelDivision
) -> set[Strategy]:
    """Return strategies of these degrees on the ranks, which may be more than needed: the fastest are taken.

    In the order given; with groups within nodes as far as possible; with slow ranks together, which puts them into one
    group and one stage; and with slow ranks as the same shard of each group, so that one list of shares suits all.
    Each with and without shares and boundaries by the speeds.
    """
    dp, tp, pp = degrees
    size = dp * tp * pp
    by_speed = sorted(ranks, key=lambda rank: -speeds[rank])  # stable: neighbours stay neighbours
    together = by_speed[:size]
    columns = np.array(together).reshape(tp, size // tp).T.ravel().tolist()
    as_given = [rank for rank in ranks if rank in set(together)]
    strategies = set()
    for order in (as_given, together, columns, _within_nodes(by_speed, tp, model.nodes)[:size]):
        for by_speed_of_shards, by_speed_of_stages in itertools.product((False, True), (False, True)):
            shares = _shares(degrees, order, speeds, model, by_speed=by_speed_of_shards)
            boundaries = _boundaries(degrees, order, speeds, shares, model) if by_speed_of_stages else ()
            strategies.add(Strategy(dp, tp, pp, tuple(order), shares, boundaries))
    return strategies


def _within_nodes(ranks: Sequence[int], tp: int, nodes: Sequence[int]) -> list[int]:
    """The ranks node by node, as many groups of ``tp`` of each as it has; those that are left over come last."""
    if not nodes:
        return list(ranks)
    whole, left_over = [], []
    for node in sorted({nodes[rank] for rank in ranks}):
        of_node = [rank for rank in ranks if nodes[rank] == node]
        in_groups = len(of_node) // tp * tp
        whole += of_node[:in_groups]
        left_over += of_node[in_groups:]
    return whole + left_over


def _boundaries(
    degrees: tuple[int, int, int],
    ranks: Sequence[int],
    speeds: Sequence[float],
    shares: Sequence[float],
    model: ModelDivision,
) -> tuple[int, ...]:
    """[pp + 1] by the slowest shard of each stage; none where all are as fast."""
    dp, tp, pp = degrees
    of_stage, of_shard = np.array([speeds[rank] for rank in ranks]).reshape(pp, dp, tp), np.array(shares or (1.0,) * tp)
    paces = np.full_like(of_stage, np.inf)
    np.divide(of_stage, of_shard, out=paces, where=of_shard > 0.0)
    stage_speeds = paces.min(axis=(1, 2))
    if len(set(stage_speeds.tolist())) == 1:
        return ()
    return balanced_partition(PipelineLoad.of(model.layer_work, pp, speeds=stage_speeds)).boundaries


def _shares(
    degrees: tuple[int, int, int],
    ranks: Sequence[int],
    speeds: Sequence[float],
    model: ModelDivision,
    *,
    by_speed: bool,
) -> tuple[float, ...]:
    """[tp] by the slowest rank of each shard, as all groups have the same shares; none where equal ones do.

    They are those of whole units of the most finely divided segment: speeds that divide alike give the same strategy.
    """
    dp, tp, pp = degrees
    of_shard = np.array([speeds[rank] for rank in ranks]).reshape(pp * dp, tp).min(axis=0)
    if by_speed and len(set(of_shard.tolist())) > 1:
        fewest, most = min(model.unit_counts, default=1), max(model.unit_counts, default=1)
        counts = np.diff(unit_bounds(most, _with_a_unit_each(of_shard.tolist(), fewest)))
        shares = _with_a_unit_each(counts.tolist(), fewest)
        is_even = all(len(set(np.diff(unit_bounds(units, shares)).tolist())) == 1 for units in model.unit_counts)
        if not is_even and len(set(shares)) > 1:
            return shares
    if all(units % tp == 0 for units in model.unit_counts):
        return ()
    return (1.0 + ROUNDING, *(1.0,) * (tp - 1))  # equal shares of units that do not divide are refused as a mistake


def _with_a_unit_each(shares: Sequence[float], num_units: int) -> tuple[float, ...]:
    """The same, where the smallest are so large that each gets a unit: layers need not work without any."""
    if len(shares) >= num_units:
        return (1.0,) * len(shares)
    raised = np.array(shares, dtype=np.float64)
    while (is_small := raised * num_units < raised.sum() * (1.0 - ROUNDING)).any():
        raised[is_small] = raised.sum() / num_units  # of a sum that has grown: a little too small yet
    return tuple(raised.tolist())


def _best(
    kind: Kind,
    left_out: tuple[int, ...],
    options: Sequence[set[Strategy]],
    speeds: Sequence[float],
    costs: StrategyCosts,
) -> list[Candidate]:
    """The fastest strategy of the optimizer that fits, and for each other range the fastest option that fits beside it.

    Nothing where there is none.
    """
    ranked = []
    for number, strategies in enumerate(options):
        # Of equally fast ones that which is told most shortly, on all ranks alike.
        keys = {each: (costs.range_s(number, each, speeds), len(str(each)), str(each)) for each in strategies}
        ranked.append(sorted((each for each in strategies if keys[each][0] < np.inf), key=lambda each: keys[each]))
    for optimizer_strategy in ranked[costs.optimizer_strategy]:
        allowed = list(ranked)
        allowed[costs.optimizer_strategy] = [optimizer_strategy]
        fastest = [
            next((each for each in strategies if costs.fits(number, each, optimizer_strategy)), None)
            for number, strategies in enumerate(allowed)
        ]
        chosen = tuple(strategy for strategy in fastest if strategy is not None)
        if len(chosen) == len(fastest) and costs.switches_fit(chosen):
            return [Candidate(kind, left_out, chosen)]
    return []
