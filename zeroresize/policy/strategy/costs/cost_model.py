"""How long a step takes under strategies, and how much memory: plain numbers.

A micro-batch of ``T`` tokens in sequences of several lengths takes a layer ``a + b·T + c·Σ length²`` seconds: matrix
products and messages grow with the tokens, attention with the squares of the sequences' lengths. ``R`` ranks, ``M``
micro-batches, ``S`` strategies, ``L`` layers. Times are seconds, memory is bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, Layout, TensorSpec
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.policy.strategy.packing import Floats
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import MAX_MESSAGE_BYTES, LinkSpeeds, SwitchPlan, fused_seconds
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.value_checks import number


@dataclass(frozen=True)
class LayerCost:
    """Hold the cost of a layer's forward and backward on one rank of a tensor-parallel group of a certain size.

    Raises:
        ValueError: for what is negative or not finite.
    """

    fixed_s: float  # a, seconds of a micro-batch, however small
    token_s: float  # b, seconds of a token
    square_s: float  # c, seconds of a length² of 1
    token_bytes: float  # memory that a token takes from its forward to its backward

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            number(f"layer cost {key}", value, least=0.0)

    def mixed(self, other: LayerCost, part: float) -> LayerCost:
        """Return the cost that lies between this one and another, ``part`` of the way to that."""
        ends = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return LayerCost(*(mine + part * (others - mine) for mine, others in ends))


@dataclass(frozen=True)
class LayerCostTable:
    """Hold the costs of all layers of a model.

    Raises:
        ValueError: for no layer, a kind without costs, kinds with costs for different degrees, or boundary bytes that
            are negative or not finite.
    """

    kinds: tuple[str, ...]  # [L] of each layer; layers of one kind cost the same
    costs: Mapping[str, Mapping[int, LayerCost]]  # of each kind by tensor-parallel degree
    boundary_bytes: float  # what a token takes on its way from a stage to the next one

    def __post_init__(self) -> None:
        number("boundary_bytes", self.boundary_bytes, least=0.0)
        missing = sorted(set(self.kinds) - set(self.costs))
        if missing or not self.kinds:
            raise ValueError(f"layers of the kinds {missing} have no costs: there are those of {sorted(self.costs)}")
        if len({tuple(sorted(by_degree)) for by_degree in self.costs.values()}) != 1:
            raise ValueError("all kinds of layers need costs for the same tensor-parallel degrees")

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return len(self.kinds)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the tensor-parallel degrees that have costs, ascending."""
        return tuple(sorted(self.costs[self.kinds[0]]))

    def stage_cost(self, layers: range, tp: int) -> LayerCost:
        """Return what some layers cost together; ValueError for a tensor-parallel degree without costs."""
        if tp not in self.degrees:
            raise ValueError(f"layers have no costs for tp={tp}: there are those of tp in {list(self.degrees)}")
        costs = [asdict(self.costs[self.kinds[layer]][tp]).values() for layer in layers]
        return LayerCost(*map(math.fsum, zip(*costs, strict=True)))


class PlannedSwitches:
    """Plans the switches between strategies when they are asked for, each once.

    ``weight_bytes`` gives [R] bytes of weights under a strategy, ``weights`` the switch of these alone to another one.
    """

    def __init__(self, tensors: Sequence[TensorSpec], nodes: Sequence[int], links: LinkSpeeds, num_layers: int) -> None:
        layout: Callable[[Strategy], Layout] = cache(lambda way: way.layout(tensors, len(nodes), num_layers))
        self.weight_bytes: Callable[[Strategy], Indices] = cache(lambda way: layout(way).rank_bytes(tensors))
        self.weights: Callable[[Strategy, Strategy], SwitchPlan] = cache(
            lambda before, after: plan_weights(layout(before), layout(after), tensors, nodes)
        )
        self._gradients: Callable[[Strategy, Strategy], SwitchPlan] = cache(
            lambda before, after: plan_gradients(layout(before), layout(after), tensors, nodes)
        )
        self._seconds: Callable[..., float] = cache(lambda *switch: fused_seconds(self.plans(*switch), links))

    def plans(self, before: Strategy, after: Strategy, optimizer_strategy: Strategy) -> list[SwitchPlan]:
        """Return what travels: weights and, from another strategy than the optimizer's, gradients to that."""
        returning = [] if before == optimizer_strategy else [self._gradients(before, optimizer_strategy)]
        return [self.weights(before, after), *returning]

    def seconds(self, strategies: Sequence[Strategy], optimizer_strategy: int) -> Floats:
        """Return [S, S] seconds of switching from the strategy of the row to that of the column, 0 on the diagonal."""
        seconds = np.zeros((len(strategies), len(strategies)))
        for before, after in itertools.permutations(range(len(strategies)), 2):
            switch = strategies[before], strategies[after], strategies[optimizer_strategy]
            seconds[before, after] = self._seconds(*switch)
        return seconds


@checked(nodes=integer(0), optimizer_ratio=real(least=0.0), slowness=real(above=0.0), max_message_bytes=integer(1))
@dataclass(frozen=True)
class CostModel:
    """Hold what is known of a model and its machines.

    Attributes:
        layers: seconds and bytes of the layers.
        tensors: of the whole model, with bytes of an element as they travel; gradients are as large.
        nodes: [R] on which node each rank is.
        links: of the ranks.
        optimizer_ratio: bytes of optimizer state for a byte of weights; 2 for Adam in the precision of the weights, 6
            for Adam and weights in fp32 beside weights in bf16.
        slowness: [R] χ: how many times its normal time a rank's products take; empty if none is slow.
        max_message_bytes: of a switch's messages that a rank sends and receives at once.

    Raises:
        ValueError: for no node, an optimizer ratio that is negative, or slowness that is not of all ranks or not
            above 0.
    """

    layers: LayerCostTable
    tensors: tuple[TensorSpec, ...]
    nodes: tuple[int, ...]
    links: LinkSpeeds
    optimizer_ratio: float = 2.0
    slowness: tuple[float, ...] = ()
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes name no rank: at least one is needed")
        if self.slowness and len(self.slowness) != len(self.nodes):
            raise ValueError(f"slowness of {len(self.slowness)} ranks is given: there are {len(self.nodes)}")

    @cached_property
    def switches(self) -> PlannedSwitches:
        """Return what the switches between strategies send, and how long they take."""
        return PlannedSwitches(self.tensors, self.nodes, self.links, self.layers.num_layers)

    def stage_costs(self, strategy: Strategy) -> list[LayerCost]:
        """Return [pp] costs of the layers of each stage, on one rank that has an equal share and is not slow."""
        partition = strategy.partition(self.layers.num_layers)
        return [self.layers.stage_cost(partition.layers_of(stage), strategy.tp) for stage in range(strategy.pp)]

    def work_seconds(self, strategy: Strategy, replicas: Sequence[Floats]) -> float:
        """Return the seconds of training micro-batches without switches; replicas wait for the slowest one.

        Args:
            replicas: [dp] of each replica [M, 2]: tokens and Σ length² of its micro-batches, as of
                :func:`~zeroresize.policy.strategy.packing.packed_sums`.
        """
        if len(replicas) != strategy.dp:
            raise ValueError(f"strategy {strategy} has {strategy.dp} replicas: micro-batches are for {len(replicas)}")
        costs = np.array([[cost.fixed_s, cost.token_s, cost.square_s] for cost in self.stage_costs(strategy)])
        of_replicas = (self._stage_seconds(strategy, replica, sums, costs) for replica, sums in enumerate(replicas))
        return max(map(pipeline_seconds, of_replicas))

    def _stage_seconds(self, strategy: Strategy, replica: int, sums: Floats, costs: Floats) -> Floats:
        """[M, pp] of each micro-batch on each stage, forward and backward, with messages to the neighbours."""
        seconds: Floats = np.column_stack([np.ones(len(sums)), sums]) @ costs.T
        seconds *= np.array([self._slowness_of(strategy, replica, stage) for stage in range(strategy.pp)])
        for stage in range(strategy.pp - 1):  # an activation to the next stage, a gradient back
            ranks = [strategy.rank_at(Position(replica, end, 0)) for end in (stage, stage + 1)]
            transfer_s = 2.0 * self.layers.boundary_bytes * sums[:, 0] / self._link(ranks)
            seconds[:, stage : stage + 2] += transfer_s[:, None] / 2.0
        return seconds

    def reduction_seconds(self, optimizer_strategy: Strategy) -> float:
        """Return the seconds of the one all-reduce of a step's gradients between the optimizer's replicas.

        It is a ring over its slowest link.
        """
        if optimizer_strategy.dp == 1:
            return 0.0
        sizes = self.switches.weight_bytes(optimizer_strategy)
        slowest = max(float(sizes[list(group)].max()) / self._link(group) for group in optimizer_strategy.dp_groups())
        return 2.0 * (optimizer_strategy.dp - 1) / optimizer_strategy.dp * slowest

    def memory_bytes(self, strategy: Strategy, optimizer_strategy: Strategy, tokens: int) -> Floats:
        """Return [R] the most bytes that each rank holds while this strategy trains micro-batches of so many tokens.

        Weights and their gradients, where the optimizer's strategy is another its gradients besides, the optimizer's
        state in the optimizer's layout, and the activations of the micro-batches that 1F1B keeps on a stage, pp −
        stage.
        """
        trained, of_optimizer = map(self.switches.weight_bytes, (strategy, optimizer_strategy))
        held: Floats = 2.0 * trained + (self.optimizer_ratio + (strategy != optimizer_strategy)) * of_optimizer
        for stage, cost in enumerate(self.stage_costs(strategy)):
            activations = cost.token_bytes * tokens * (strategy.pp - stage)
            for replica, shard in itertools.product(range(strategy.dp), range(strategy.tp)):
                share = strategy.shares[shard] if strategy.shares else 1.0
                held[strategy.rank_at(Position(replica, stage, shard))] += activations * share
        return held

    def fits(self, strategy: Strategy, optimizer_strategy: Strategy, tokens: int, limit_bytes: float) -> bool:
        """Whether no rank needs more than the limit for micro-batches of so many tokens."""
        return float(self.memory_bytes(strategy, optimizer_strategy, tokens).max()) <= limit_bytes

    def switch_memory_bytes(self, before: Strategy, after: Strategy, optimizer_strategy: Strategy) -> Floats:
        """Return [R] the most bytes that each rank holds during a switch, which has no activations.

        What fits into one round of messages lies in one buffer. Of several rounds, the next is packed while one
        travels. Sums inside nodes have buffers of their own. From another strategy than the optimizer's, gradients
        travel as well.
        """
        left, wanted, of_optimizer = map(self.switches.weight_bytes, (before, after, optimizer_strategy))
        held: Floats = left + wanted + (1.0 + self.optimizer_ratio) * of_optimizer
        if before != optimizer_strategy:
            held += left
        plans = self.switches.plans(before, after, optimizer_strategy)
        for num_bytes in (
            np.sum([plan.volumes for plan in plans], axis=(0, 1, 2)),
            np.sum([plan.summed_bytes for plan in plans], axis=(0, 1)),
        ):
            is_one_round = np.max(num_bytes) <= self.max_message_bytes // 2
            held += num_bytes if is_one_round else np.minimum(2 * num_bytes, self.max_message_bytes)
        return held

    def switches_fit(
        self, strategies: Sequence[Strategy], optimizer_strategy: int, limit_bytes: float
    ) -> NDArray[np.bool_]:
        """Return [S, S] whether no rank needs more than the limit to switch from the row's strategy to the column's."""
        fit = np.ones((len(strategies), len(strategies)), dtype=bool)
        for before, after in itertools.permutations(range(len(strategies)), 2):
            switch = strategies[before], strategies[after], strategies[optimizer_strategy]
            fit[before, after] = float(self.switch_memory_bytes(*switch).max()) <= limit_bytes
        return fit

    def _link(self, ranks: Sequence[int]) -> float:
        is_within = len({self.nodes[rank] for rank in ranks}) == 1
        return self.links.within_bytes_per_s if is_within else self.links.between_bytes_per_s

    def _slowness_of(self, strategy: Strategy, replica: int, stage: int) -> float:
        """How many times the seconds of an equal share on a normal rank a tensor-parallel group takes."""
        ranks = [strategy.rank_at(Position(replica, stage, shard)) for shard in range(strategy.tp)]
        slowness = [self.slowness[rank] for rank in ranks] if self.slowness else [1.0] * strategy.tp
        shares = strategy.shares or (1.0,) * strategy.tp
        return max(share * chi for share, chi in zip(shares, slowness, strict=True))


def pipeline_seconds(stage_s: Floats) -> float:
    """Return the seconds under 1F1B of micro-batches that take [M, pp] seconds forward and backward on each stage.

    All of them run one after another on their slowest stages, and the pipeline is filled and drained. Exact for equal
    micro-batches on equal stages; uneven ones wait for each other a little longer. A search asks for this so often that
    it cannot simulate steps.
    """
    if not stage_s.size:
        return 0.0
    num_stages = stage_s.shape[1]
    largest = stage_s[int(stage_s.sum(axis=1).argmax())]
    return float(stage_s.max(axis=1).sum() + largest.sum() - largest.max()) if num_stages > 1 else float(stage_s.sum())
