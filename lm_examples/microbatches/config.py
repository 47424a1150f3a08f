"""What a run in planned micro-batches is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

from torch import nn

from lm_examples.microbatches.models import ModelConfig, padded_layers
from lm_examples.microbatches.tasks import TaskLengths
from lm_examples.sections import BalanceConfig, CommonRunConfig, DataConfig, StragglerConfig, TokenTrainingConfig
from vit_examples.harness.checked_fields import Count, NonNegative, Positive, Section, Timeout
from zeroresize.microbatch.measuring import ProfiledShapes
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import NUM_CLUSTERS, Method, PlanningOptions, SampleOrder, ScheduleName
from zeroresize.utils.value_checks import at_least

_Length = Annotated[int, partial(at_least, least=2)]


@dataclass(frozen=True, kw_only=True)
class TasksConfig(DataConfig):
    """The samples.

    Attributes:
        max_length: tokens of a decoder-only sample, or of a source, at most; what is longer is cut there.
        max_target: of a target.
        scale: of all lengths, which are like those of FLANv2: a median of about 100 tokens, and some of thousands.
    """

    max_length: _Length = 256
    max_target: _Length = 64
    scale: Positive = 0.25


@dataclass(frozen=True, kw_only=True)
class MicroBatchesConfig(Section):
    """How mini-batches become micro-batches.

    Attributes:
        method: "dynamic", planned; "packing", "fixed" and "tokens" for comparison.
        size: of "packing" rows, of "fixed" samples, of "tokens" padded tokens of a micro-batch.
        order: "sorted", or "tour" for samples with two lengths.
        schedule: "adaptive" or "1f1b".
        clusters: of micro-batches by their seconds, whose order is chosen.
        memory_limit: bytes of activations of a rank at most; None for no limit.
        recompute: what may be computed again in backwards, of "none", "attention" and "layers".
        costs: file of measured costs; None measures at the beginning and keeps ``costs.json`` in the output folder.
        most_rows: rows of a micro-batch up to which costs are measured.
        workers: planner processes of each node.
        ahead: iterations that they may be ahead; None for as many as keep them busy.
    """

    section: ClassVar[str] = "microbatches"
    method: Method = "dynamic"
    size: Count = 1
    order: SampleOrder = "sorted"
    schedule: ScheduleName = "adaptive"
    clusters: Annotated[int, partial(at_least, least=1, most=2 * NUM_CLUSTERS)] = NUM_CLUSTERS
    memory_limit: Positive | None = None
    recompute: tuple[Literal["none", "attention", "layers"], ...] = ("none", "layers")
    costs: str | None = None
    most_rows: Count = 64
    workers: Count = 1
    ahead: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.recompute:
            raise ValueError("microbatches.recompute=[] is not allowed: at least one is needed")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How the model is spread over the ranks.

    Attributes:
        dp: replicas.
        tp: ranks that divide each layer.
        pp: stages.
        boundaries: [pp + 1]: stage s has the layers from entry s up to entry s + 1; None for equally many on each.
        timeout_s: seconds after which a message that does not come fails.
    """

    section: ClassVar[str] = "parallel"
    dp: Count = 1
    tp: Count = 1
    pp: Count = 2
    boundaries: tuple[int, ...] | None = None
    timeout_s: Timeout = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.strategy  # noqa: B018
        except ValueError as error:
            raise ValueError(f"parallel: {error}") from error

    @property
    def strategy(self) -> Strategy:
        """Return the same as a strategy."""
        return Strategy(self.dp, self.tp, self.pp, boundaries=self.boundaries or ())


@dataclass(frozen=True, kw_only=True)
class SleepConfig(Section):
    """Sleeps in place of work, so that a machine with few cores shows what many devices do.

    Attributes:
        token_s: seconds that a block sleeps in forward for each token, padding included; twice as long in backward.
        square_s: for each pair of tokens of a row.
    """

    section: ClassVar[str] = "sleep"
    token_s: NonNegative = 0.0
    square_s: NonNegative = 0.0

    @property
    def is_on(self) -> bool:
        """Whether blocks sleep."""
        return self.token_s > 0.0 or self.square_s > 0.0

    def seconds_of(self, batch: PaddedBatch | PairBatch) -> float:
        """How long a block sleeps for a micro-batch."""
        rows, *lengths = batch.sizes.values()
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return rows * (self.token_s * tokens + self.square_s * squares) / len(lengths)


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonRunConfig):
    """One run."""

    feed: str = "microbatches"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: TasksConfig = field(default_factory=TasksConfig)
    training: TokenTrainingConfig = field(default_factory=TokenTrainingConfig)
    microbatches: MicroBatchesConfig = field(default_factory=MicroBatchesConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)

    @property
    def lengths(self) -> TaskLengths:
        """Of the samples."""
        return TaskLengths(self.longest, self.training.tokens, self.data.scale, self.training.seed)

    @property
    def longest(self) -> tuple[int, ...]:
        """[A] tokens of a sample at most."""
        return (self.data.max_length,) if self.model.kind == "gpt" else (self.data.max_length, self.data.max_target)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of a micro-batch's sizes."""
        return ("size", "length") if self.model.kind == "gpt" else ("size", "source", "target")

    @property
    def options(self) -> PlanningOptions:
        """Of planning."""
        chosen = self.microbatches
        return PlanningOptions(
            self.parallel.dp,
            math.inf if chosen.memory_limit is None else chosen.memory_limit,
            chosen.method,
            chosen.size,
            self.longest if chosen.method == "packing" else (),
            chosen.order,
            chosen.schedule,
            chosen.clusters,
        )

    @property
    def shapes(self) -> ProfiledShapes:
        """For which costs are measured."""
        most_tokens = float(self.training.tokens)
        return ProfiledShapes(self.sizes, self.microbatches.most_rows, self.longest, 16, most_tokens=most_tokens)

    def build(self) -> list[nn.Module]:
        """All layers."""
        return padded_layers(self.model)

    def validate_ranks(self, num_ranks: int) -> None:
        """Raises ValueError for a division that does not fit the model or so many ranks."""
        strategy = self.parallel.strategy
        if strategy.num_ranks != num_ranks:
            raise ValueError(
                f"parallel: dp × tp × pp = {strategy.num_ranks} ranks are needed, and there are {num_ranks}: start as "
                "many, or change parallel"
            )
        self.straggler.validate_ranks(num_ranks)
        self.require_layouts("parallel", [strategy], num_ranks)
