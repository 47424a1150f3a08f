"""What strategies could become while some ranks are slow: shrink them, put them together, or leave them out.

Pure: the same speeds give the same candidates on every rank.

``R`` ranks of the job, ``L`` layers, ``G`` ranges of lengths, each with a strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from zeroresize.plan.layout import unit_bounds
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad

#: "stay": as it is; "replan": planned anew for the speeds that ranks have; "shares": units move within tensor-parallel
#: groups; "rearrange": ranks change places, layers stages; "leave out": the slowest ranks do nothing; "original": as
#: the caller gave the strategies.
Kind = Literal["stay", "replan", "shares", "rearrange", "leave out", "original"]
#: A rank this much slower than the fastest one is slow; the same as what is believed to be noise elsewhere.
SLOW_BELOW = 0.9
#: No more than this share of the ranks is left out.
MOST_LEFT_OUT = 0.5
#: Groups of up to so many ranks may go on with one rank less; larger ones become as small as degrees that are known.
_SMALL_GROUP = 4
#: Equal shares of units that do not divide are refused as a mistake: one share is so much larger where they are meant.
_HAIR = 1e-6
_POWERS = tuple(2**power for power in range(20))


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

    @property
    def most_shards(self) -> int:
        """Return the largest tensor-parallel degree; 1 where nothing is divided."""
        return min(self.unit_counts, default=1)


@dataclass(frozen=True)
class Candidate:
    """Describe strategies of all ranges that may be put in force together.

    Attributes:
        kind: what is done.
        left_out: the slow ranks that get no part in any strategy, rising.
        strategies: [G].
    """

    kind: Kind
    left_out: tuple[int, ...]
    strategies: tuple[Strategy, ...]

    @property
    def key(self) -> str:
        """Return what is the same for all that is done with the same ranks, whatever their shares are just now."""
        return f"{self.kind} {' '.join(map(str, self.left_out))}".strip()


class StrategyCosts(Protocol):
    """Tell what steps and switches take, as far as is known before.

    Attributes:
        optimizer_strategy: the number of the range under whose strategy the optimizer steps.
    """

    optimizer_strategy: int

    def range_s(self, number: int, strategy: Strategy, speeds: Sequence[float]) -> float:
        """Return the seconds of range ``number`` under a strategy, infinite where it is out of the question.

        Rank r is ``speeds[r]`` times as fast as the model of costs says.
        """

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the seconds of a step under these strategies, one of each range, with the switches in it."""

    def fits(self, number: int, strategy: Strategy, optimizer_strategy: Strategy) -> bool:
        """Whether memory suffices to train range ``number`` under a strategy with the optimizer in this one."""

    def switches_fit(self, strategies: Sequence[Strategy]) -> bool:
        """Whether memory suffices for the switches between the strategies of all ranges."""

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes that the busiest rank sends or receives when training goes on under others.

        These are weights and the optimizer's state, where the optimizer's strategy is another; 0 otherwise.
        """


def candidates(
    original: Sequence[Strategy],
    in_force: Sequence[Strategy],
    speeds: Sequence[float],
    model: ModelDivision,
    costs: StrategyCosts,
) -> list[Candidate]:
    """Return what could be in force now, of each kind the best for each range; "stay" is the first.

    Nothing but to stay and to go back is offered while all ranks are about equally fast.

    Args:
        original: [G] as the caller gave them.
        in_force: [G] as they are now.
        speeds: [R], above zero.
    """
    taken = set(itertools.chain.from_iterable(one.ranks for one in in_force))
    idle = tuple(rank for rank in range(len(speeds)) if rank not in taken)
    offered = [Candidate("stay", idle, tuple(in_force)), Candidate("original", (), tuple(original))]
    slow = slow_ranks(original, speeds)
    if slow:
        shares = [{_with_shares(one, speeds, model), one} for one in original]
        rearranged = [arrangements(one.degrees, one.ranks, speeds, model) | {one} for one in original]
        offered += _best("shares", (), shares, speeds, costs)
        offered += _best("rearrange", (), rearranged, speeds, costs)
    for size in range(1, min(len(slow), int(MOST_LEFT_OUT * len(speeds))) + 1):
        left_out = tuple(sorted(slow[:size]))
        smaller = [_on_the_rest(one, left_out, speeds, model) for one in original]
        offered += _best("leave out", left_out, smaller, speeds, costs)
    first: dict[tuple[Strategy, ...], Candidate] = {}
    for candidate in offered:
        first.setdefault(candidate.strategies, candidate)
    return list(first.values())


def smaller_degrees(degrees: tuple[int, int, int], num_ranks: int, model: ModelDivision) -> list[tuple[int, int, int]]:
    """Return the same (dp, tp, pp), or next smaller groups and pipelines, with as many replicas as there are ranks for.

    What fewer ranks do stays like what all did: other strategies may be better whoever is slow, and that is a search's
    matter (:mod:`zeroresize.policy.strategy.costs.search`).
    """
    _, tp, pp = degrees
    return [
        (num_ranks // (shards * stages), shards, stages)
        for shards, stages in itertools.product(_next_smaller(tp, model.degrees or _POWERS), _next_smaller(pp, _POWERS))
        if shards * stages <= num_ranks
    ]


def _next_smaller(degree: int, known: Sequence[int]) -> list[int]:
    """Itself, the next smaller known one and, of a small one, one less."""
    degrees = {degree, max((one for one in known if one < degree), default=degree)}
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
    within = _within_nodes(by_speed, tp, model.nodes)[:size]
    taken = set(by_speed[:size])
    together = by_speed[:size]
    columns = np.array(together).reshape(tp, size // tp).T.ravel().tolist()
    strategies = set()
    for order in ([rank for rank in ranks if rank in taken], together, columns, within):
        for shares, boundaries in itertools.product((False, True), (False, True)):
            strategies.add(_divided(degrees, order, speeds, model, by_shares=shares, by_layers=boundaries))
    return strategies


def _with_shares(strategy: Strategy, speeds: Sequence[float], model: ModelDivision) -> Strategy:
    """The strategy with shares by the speeds: units move inside the tensor-parallel groups, and nothing else does."""
    return replace(strategy, shares=_shares(strategy.degrees, strategy.ranks, speeds, model, by_speed=True))


def _within_nodes(ranks: Sequence[int], tp: int, nodes: Sequence[int]) -> list[int]:
    """The ranks node by node, as many groups of ``tp`` of each as it has; those that are left over come last."""
    if not nodes:
        return list(ranks)
    of_node: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: nodes[rank]):
        of_node.setdefault(nodes[rank], []).append(rank)
    whole = {node: len(own) // tp * tp for node, own in of_node.items()}
    groups = [rank for node, own in of_node.items() for rank in own[: whole[node]]]
    return groups + [rank for node, own in of_node.items() for rank in own[whole[node] :]]


def _divided(
    degrees: tuple[int, int, int],
    ranks: Sequence[int],
    speeds: Sequence[float],
    model: ModelDivision,
    *,
    by_shares: bool,
    by_layers: bool,
) -> Strategy:
    dp, tp, pp = degrees
    shares = _shares(degrees, ranks, speeds, model, by_speed=by_shares)
    of_stage = np.array([speeds[rank] for rank in ranks]).reshape(pp, dp, tp)
    of_shard = np.array(shares or (1.0,) * tp)
    paces = np.full_like(of_stage, np.inf)
    np.divide(of_stage, of_shard, out=paces, where=of_shard > 0.0)
    stage_speeds = paces.min(axis=(1, 2))
    boundaries: tuple[int, ...] = ()
    if by_layers and len(set(stage_speeds.tolist())) > 1:
        boundaries = balanced_partition(PipelineLoad.of(model.layer_work, pp, speeds=stage_speeds)).boundaries
    return Strategy(dp, tp, pp, tuple(ranks), shares, boundaries)


def _shares(
    degrees: tuple[int, int, int],
    ranks: Sequence[int],
    speeds: Sequence[float],
    model: ModelDivision,
    *,
    by_speed: bool,
) -> tuple[float, ...]:
    """[tp] by the slowest rank of each shard, as all groups have the same shares; none where equal ones do."""
    dp, tp, pp = degrees
    of_shard = np.array([speeds[rank] for rank in ranks]).reshape(pp * dp, tp).min(axis=0)
    if by_speed and len(set(of_shard.tolist())) > 1:
        shares = _in_units(_with_a_unit_each(of_shard.tolist(), model.most_shards), model)
        is_even = all(len(set(np.diff(unit_bounds(units, shares)).tolist())) == 1 for units in model.unit_counts)
        if not is_even and len(set(shares)) > 1:
            return shares
    if all(units % tp == 0 for units in model.unit_counts):
        return ()
    return (1.0 + _HAIR, *(1.0,) * (tp - 1))


def _in_units(shares: Sequence[float], model: ModelDivision) -> tuple[float, ...]:
    """Those of whole units of the most finely divided segment: speeds that divide alike give the same strategy."""
    counts = np.diff(unit_bounds(max(model.unit_counts), shares)).astype(np.float64)
    return _with_a_unit_each(counts.tolist(), model.most_shards)


def _with_a_unit_each(shares: Sequence[float], num_units: int) -> tuple[float, ...]:
    """The same, where the smallest are so large that each gets a unit: layers need not work without any."""
    raised = np.array(shares, dtype=np.float64)
    is_least = np.zeros(len(raised), dtype=bool)
    while True:
        too_small = raised * num_units < raised.sum() * (1.0 - 1e-9)
        if not (too_small & ~is_least).any():
            return tuple(raised.tolist())
        is_least |= too_small
        if is_least.all() or is_least.sum() >= num_units:
            return (1.0,) * len(raised)
        raised[is_least] = raised[~is_least].sum() / (num_units - is_least.sum())


def slow_ranks(strategies: Sequence[Strategy], speeds: Sequence[float]) -> list[int]:
    """Return the ranks with a part in the strategies that are slower than :data:`SLOW_BELOW` allows, slowest first."""
    ranks = sorted(set(itertools.chain.from_iterable(one.ranks for one in strategies)))
    fastest = max(speeds[rank] for rank in ranks)
    return sorted((rank for rank in ranks if speeds[rank] < SLOW_BELOW * fastest), key=lambda rank: speeds[rank])


def _on_the_rest(
    strategy: Strategy, left_out: Sequence[int], speeds: Sequence[float], model: ModelDivision
) -> set[Strategy]:
    rest = [rank for rank in strategy.ranks if rank not in left_out]
    strategies: set[Strategy] = set()
    for degrees in smaller_degrees(strategy.degrees, len(rest), model):
        strategies |= arrangements(degrees, rest, speeds, model)
    return strategies


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
        seconds_of = {one: costs.range_s(number, one, speeds) for one in strategies}
        possible = [one for one in strategies if seconds_of[one] < np.inf]
        # Of equally fast ones that which is told most shortly, on all ranks alike.
        ranked.append(sorted(possible, key=lambda one: (seconds_of[one], len(str(one)), str(one))))
    for optimizer_strategy in ranked[costs.optimizer_strategy]:
        fitting = [
            [one for one in strategies if costs.fits(number, one, optimizer_strategy)][:1]
            for number, strategies in enumerate(
                [optimizer_strategy] if number == costs.optimizer_strategy else strategies
                for number, strategies in enumerate(ranked)
            )
        ]
        chosen = tuple(itertools.chain.from_iterable(fitting))
        if len(chosen) == len(ranked) and costs.switches_fit(chosen):
            return [Candidate(kind, left_out, chosen)]
    return []
