"""How long a step takes under strategies, and how much memory: plain numbers.

``R`` ranks, ``M`` micro-batches, ``S`` strategies. Times are seconds, memory is bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, TensorSpec
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.policy.strategy.costs.layer_cost_table import LayerCost, LayerCostTable
from zeroresize.policy.strategy.costs.planned_switches import PlannedSwitches
from zeroresize.policy.strategy.switches.transfers import MAX_MESSAGE_BYTES, LinkSpeeds, SwitchPlan
from zeroresize.utils.value_checks import at_least, number

Floats = NDArray[np.float64]
#: The lengths of the sequences of one micro-batch.
MicroBatch = Sequence[int]


def pipeline_seconds(stage_s: Floats) -> float:
    """Return the seconds of micro-batches under 1F1B.

    All of them run one after another on their slowest stages, and the pipeline is filled and drained.

    Exact for equal micro-batches on equal stages, (M + pp − 1) times one. For micro-batches of different sizes it is
    what a flow shop of equal machines takes; uneven ones in 1F1B wait for each other a little longer.

    Args:
        stage_s: [M, pp] forward and backward of each micro-batch on each stage.
    """
    if not stage_s.size:
        return 0.0
    num_stages = stage_s.shape[1]
    largest = stage_s[int(stage_s.sum(axis=1).argmax())]
    return float(stage_s.max(axis=1).sum() + largest.sum() - largest.max()) if num_stages > 1 else float(stage_s.sum())


def batch_sums(replicas: Sequence[Sequence[MicroBatch]]) -> list[tuple[Floats, Floats]]:
    """Return, for each of dp replicas, [M] tokens of its micro-batches, and [M] sums of their sequences' length²."""
    return [
        (
            np.array([sum(own) for own in batches], dtype=np.float64),
            np.array([sum(length * length for length in own) for own in batches], dtype=np.float64),
        )
        for batches in replicas
    ]


@dataclass(frozen=True)
class CostModel:
    """Hold what is known of a model and a cluster.

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
        for key in ("tensors", "nodes", "slowness"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        number("optimizer_ratio", self.optimizer_ratio, least=0.0)
        at_least("max_message_bytes", self.max_message_bytes, 1)
        if not self.nodes:
            raise ValueError("nodes name no rank: at least one is needed")
        if self.slowness and len(self.slowness) != self.num_ranks:
            raise ValueError(f"slowness of {len(self.slowness)} ranks is given: there are {self.num_ranks}")
        for factor in self.slowness:
            number("slowness", factor, above=0.0)

    @property
    def num_ranks(self) -> int:
        """Return R, the number of ranks."""
        return len(self.nodes)

    def stage_costs(self, strategy: Strategy) -> list[LayerCost]:
        """Return [pp] costs of the layers of each stage, on one rank that has an equal share and is not slow."""
        partition = strategy.partition(self.layers.num_layers)
        return [self.layers.stage_cost(partition.layers_of(stage), strategy.tp) for stage in range(strategy.pp)]

    def micro_batch_seconds(self, strategy: Strategy, replica: int, tokens: Floats, squares: Floats) -> Floats:
        """Return [M, pp] seconds of each micro-batch on each stage, forward and backward.

        Messages to the neighbours are included.

        Args:
            tokens: [M] of each micro-batch.
            squares: [M] the sum of its sequences' length².
        """
        costs = np.array([[one.fixed_s, one.token_s, one.square_s] for one in self.stage_costs(strategy)])
        seconds = np.stack([np.ones_like(tokens), tokens, squares], axis=1) @ costs.T
        seconds *= np.array([self._slowness_of(strategy, replica, stage) for stage in range(strategy.pp)])
        for stage in range(strategy.pp - 1):  # an activation to the next stage, a gradient back
            ranks = [strategy.rank_at(Position(replica, own, 0)) for own in (stage, stage + 1)]
            transfer_s = 2.0 * self.layers.boundary_bytes * tokens / self._link(ranks)
            seconds[:, stage : stage + 2] += transfer_s[:, None] / 2.0
        return seconds

    def work_seconds(self, strategy: Strategy, replicas: Sequence[Sequence[MicroBatch]]) -> float:
        """Return the seconds of training micro-batches without switches; replicas wait for the slowest one.

        Args:
            replicas: [dp] micro-batches of each replica.

        Raises:
            ValueError: for another number of replicas than the strategy has, and as :class:`LayerCostTable`.
        """
        if len(replicas) != strategy.dp:
            raise ValueError(f"strategy {strategy} has {strategy.dp} replicas: micro-batches are for {len(replicas)}")
        return self.summed_work_seconds(strategy, batch_sums(replicas))

    def summed_work_seconds(self, strategy: Strategy, replicas: Sequence[tuple[Floats, Floats]]) -> float:
        """Return the same as :meth:`work_seconds`, from what :func:`batch_sums` says of each replica."""
        return max(
            pipeline_seconds(self.micro_batch_seconds(strategy, replica, tokens, squares))
            for replica, (tokens, squares) in enumerate(replicas)
        )

    def reduction_seconds(self, optimizer_strategy: Strategy) -> float:
        """Return the seconds of the one all-reduce of a step's gradients between the optimizer's replicas.

        It is a ring over its slowest link.
        """
        if optimizer_strategy.dp == 1:
            return 0.0
        sizes = self.weight_bytes(optimizer_strategy)
        slowest = max(float(sizes[list(group)].max()) / self._link(group) for group in optimizer_strategy.dp_groups())
        return 2.0 * (optimizer_strategy.dp - 1) / optimizer_strategy.dp * slowest

    def switch_seconds(self, strategies: Sequence[Strategy], optimizer_strategy: int) -> Floats:
        """Return [S, S] seconds of switching from the strategy of the row to that of the column, 0 on the diagonal.

        The weights travel to the next strategy and, in the same messages, the gradients of the strategy that is left
        travel to the optimizer's strategy, where its own stay.

        Args:
            optimizer_strategy: its number among the strategies.
        """
        return self._switches.seconds(strategies, optimizer_strategy)

    def weight_plan(self, before: Strategy, after: Strategy) -> SwitchPlan:
        """Plan the switch of the weights alone."""
        return self._switches.weights(before, after)

    def weight_bytes(self, strategy: Strategy) -> Indices:
        """Return [R] bytes of weights of each rank."""
        return self._switches.weight_bytes(strategy)

    def memory_bytes(self, strategy: Strategy, optimizer_strategy: Strategy, tokens: int) -> Floats:
        """Return [R] the most bytes that each rank holds while this strategy trains micro-batches of so many tokens.

        Weights and their gradients, where the optimizer's strategy is another its gradients besides, the optimizer's
        state in the optimizer's layout, and the activations of the micro-batches that 1F1B keeps on a stage, pp −
        stage.
        """
        held = np.zeros(self.num_ranks)
        held += 2 * self.weight_bytes(strategy)
        held += (self.optimizer_ratio + (strategy != optimizer_strategy)) * self.weight_bytes(optimizer_strategy)
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
        """Return [R] the most bytes that each rank holds during a switch, see :func:`switch_bytes`.

        Its messages are included.
        """
        return switch_bytes(
            self.weight_bytes(before),
            self.weight_bytes(after),
            self.weight_bytes(optimizer_strategy),
            self._switches.plans(before, after, optimizer_strategy),
            is_optimizer_strategy=before == optimizer_strategy,
            optimizer_ratio=self.optimizer_ratio,
            max_bytes=self.max_message_bytes,
        )

    def switches_fit(
        self, strategies: Sequence[Strategy], optimizer_strategy: int, limit_bytes: float
    ) -> NDArray[np.bool_]:
        """Return [S, S] whether no rank needs more than the limit to switch from the row's strategy to the column's."""
        return np.array(
            [
                [
                    before == after
                    or float(self.switch_memory_bytes(before, after, strategies[optimizer_strategy]).max())
                    <= limit_bytes
                    for after in strategies
                ]
                for before in strategies
            ]
        )

    def _link(self, ranks: Sequence[int]) -> float:
        is_within = len({self.nodes[rank] for rank in ranks}) == 1
        return self.links.within_bytes_per_s if is_within else self.links.between_bytes_per_s

    def _slowness_of(self, strategy: Strategy, replica: int, stage: int) -> float:
        """How many times the seconds of an equal share on a normal rank a tensor-parallel group takes."""
        ranks = [strategy.rank_at(Position(replica, stage, shard)) for shard in range(strategy.tp)]
        slowness = [self.slowness[rank] for rank in ranks] if self.slowness else [1.0] * strategy.tp
        shares = strategy.shares or (1.0,) * strategy.tp
        return max(share * one for share, one in zip(shares, slowness, strict=True))

    @cached_property
    def _switches(self) -> PlannedSwitches:
        return PlannedSwitches(self.tensors, self.nodes, self.links, self.layers.num_layers)


def switch_bytes(
    before: Indices,
    after: Indices,
    optimizer_strategy: Indices,
    plans: Sequence[SwitchPlan],
    *,
    is_optimizer_strategy: bool,
    optimizer_ratio: float = 2.0,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> NDArray[np.float64]:
    """Return [R] the most bytes that each rank holds during a switch, which has no activations.

    Args:
        before, after, optimizer_strategy: [R] bytes of weights under the strategy that is left, the next one, and the
            optimizer's.
        plans: of all that travels: weights and, from another strategy than the optimizer's, gradients.
        is_optimizer_strategy: whether the strategy that is left is the optimizer's, whose gradients stay.
        optimizer_ratio: bytes of optimizer state for a byte of weights.
        max_bytes: of messages that a rank sends and receives at once.
    """
    gradients = optimizer_strategy + (0 if is_optimizer_strategy else before)
    return before + after + gradients + optimizer_ratio * optimizer_strategy + _message_bytes(plans, max_bytes)


def _message_bytes(plans: Sequence[SwitchPlan], max_bytes: int) -> Indices:
    """[R] bytes of memory that the messages of plans that are carried out together take at most.

    What fits into one round lies in one buffer. Of several rounds, the next is packed while one travels. Sums inside
    nodes have buffers of their own.
    """
    num_bytes, summed_bytes = (np.zeros(len(plans[0].nodes), dtype=np.int64) for _ in range(2))
    for plan in plans:
        num_bytes += plan.sent_within + plan.sent_between + plan.received_within + plan.received_between
        summed_bytes += plan.summed_bytes.sum(axis=0)
    return _buffer_bytes(num_bytes, max_bytes) + _buffer_bytes(summed_bytes, max_bytes)


def _buffer_bytes(num_bytes: Indices, max_bytes: int) -> Indices:
    return num_bytes if num_bytes.max() <= max_bytes // 2 else np.minimum(2 * num_bytes, max_bytes)
