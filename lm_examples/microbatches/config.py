"""What a run in planned micro-batches is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lm_examples.microbatches.models import ModelConfig, padded_layers
from lm_examples.microbatches.tasks import TaskLengths
from lm_examples.sections import BalanceConfig, DataConfig, OutputConfig, StragglerConfig, require_bytes
from vit_examples.harness.sections import LONGEST_TIMEOUT_S, StepTrainingConfig, each_at_least
from zeroresize.microbatch.measuring import ProfiledShapes
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import PlanningOptions
from zeroresize.runtime.stage import RECOMPUTATIONS
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.utils.value_checks import at_least, number, one_of

#: The names of a micro-batch's sizes, by the kind of model.
SIZES = {"gpt": ("size", "length"), "t5": ("size", "source", "target")}


@dataclass(frozen=True, kw_only=True)
class TasksConfig(DataConfig):
    """The samples.

    Attributes:
        max_length: tokens of a decoder-only sample, or of a source, at most; what is longer is cut there.
        max_target: of a target.
        scale: of all lengths, which are like those of FLANv2: a median of about 100 tokens, and some of thousands.
    """

    max_length: int = 256
    max_target: int = 64
    scale: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        each_at_least("data", self, ("max_length", "max_target"), 2)
        number("data.scale", self.scale, above=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(StepTrainingConfig):
    """The loop.

    Attributes:
        tokens: of a step's mini-batch, without padding.
    """

    steps: int = 50
    tokens: int = 4096
    log_every: int = 1
    validation_batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("training.tokens", self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class MicroBatchesConfig:
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
        workers: planner processes of each host.
        ahead: iterations that they may be ahead; None for as many as keep them busy.
    """

    method: str = "dynamic"
    size: int = 1
    order: str = "sorted"
    schedule: str = "adaptive"
    clusters: int = 3
    memory_limit: float | None = None
    recompute: tuple[str, ...] = ("none", "layers")
    costs: str | None = None
    most_rows: int = 64
    workers: int = 1
    ahead: int | None = None

    def __post_init__(self) -> None:
        each_at_least("microbatches", self, ("most_rows", "workers"), 1)
        if self.ahead is not None:
            at_least("microbatches.ahead", self.ahead, 1)
        if isinstance(self.recompute, str) or not isinstance(self.recompute, Sequence) or not self.recompute:
            raise ValueError(
                f"microbatches.recompute={self.recompute!r}: a list of {list(RECOMPUTATIONS)} is needed, one at least"
            )
        object.__setattr__(self, "recompute", tuple(self.recompute))
        for way in self.recompute:
            one_of("microbatches.recompute", way, RECOMPUTATIONS)
        self.options(1, (2,))

    def options(self, num_replicas: int, row_lengths: tuple[int, ...]) -> PlanningOptions:
        """For so many replicas, with rows of so many tokens where samples are packed.

        Raises:
            ValueError: naming the key of what is not allowed.
        """
        try:
            return PlanningOptions(
                num_replicas,
                math.inf if self.memory_limit is None else self.memory_limit,
                self.method,  # type: ignore[arg-type]
                self.size,
                row_lengths if self.method == "packing" else (),
                self.order,  # type: ignore[arg-type]
                self.schedule,  # type: ignore[arg-type]
                self.clusters,
            )
        except ValueError as error:
            raise ValueError(f"microbatches: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over the ranks.

    Attributes:
        dp: replicas.
        tp: ranks that divide each layer.
        pp: stages.
        boundaries: [pp + 1]: stage s has the layers from entry s up to entry s + 1; None for equally many on each.
        timeout_s: seconds after which a message that does not come fails.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 2
    boundaries: tuple[int, ...] | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        number("parallel.timeout_s", self.timeout_s, above=0.0, most=LONGEST_TIMEOUT_S)
        try:
            self.strategy  # noqa: B018
        except ValueError as error:
            raise ValueError(f"parallel: {error}") from error

    @property
    def strategy(self) -> Strategy:
        """Return the same as a strategy."""
        return Strategy(self.dp, self.tp, self.pp, boundaries=tuple(self.boundaries or ()))


@dataclass(frozen=True, kw_only=True)
class SleepConfig:
    """Sleeps in place of work, so that a machine with few cores shows what many devices do.

    Attributes:
        token_s: seconds that a block sleeps in forward for each token, padding included; twice as long in backward.
        square_s: for each pair of tokens of a row.
    """

    token_s: float = 0.0
    square_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("token_s", "square_s"):
            number(f"sleep.{key}", getattr(self, key), least=0.0)

    @property
    def is_on(self) -> bool:
        """Whether blocks sleep."""
        return self.token_s > 0.0 or self.square_s > 0.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    feed: str = "microbatches"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: TasksConfig = field(default_factory=TasksConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    microbatches: MicroBatchesConfig = field(default_factory=MicroBatchesConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require_bytes(self.model.vocabulary)

    @property
    def lengths(self) -> TaskLengths:
        """Of the samples."""
        data = self.data
        is_joined = self.model.kind == "gpt"
        return TaskLengths(
            is_joined, self.training.tokens, data.max_length, data.max_target, data.scale, self.training.seed
        )

    @property
    def longest(self) -> tuple[int, ...]:
        """[A] tokens of a sample at most."""
        return (self.data.max_length,) if self.model.kind == "gpt" else (self.data.max_length, self.data.max_target)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of a micro-batch's sizes."""
        return SIZES[self.model.kind]

    @property
    def options(self) -> PlanningOptions:
        """Of planning."""
        return self.microbatches.options(self.parallel.dp, self.longest)

    @property
    def shapes(self) -> ProfiledShapes:
        """For which costs are measured."""
        return ProfiledShapes(
            self.sizes, self.microbatches.most_rows, self.longest, shortest=16, most_tokens=float(self.training.tokens)
        )

    def layers(self) -> list[nn.Module]:
        """The undivided model's, with weights drawn from torch's generator (none on the meta device)."""
        return [layer.to(getattr(torch, self.training.dtype)) for layer in padded_layers(self.model)]

    def tensors(self) -> list[TensorSpec]:
        """Of the undivided model."""
        with torch.device("meta"):
            return [tensor.spec for tensor in WholeLayers(self.layers()).tensors]

    @property
    def timeout_s(self) -> float:
        """Seconds after which a message that does not come fails."""
        return self.parallel.timeout_s

    @property
    def num_layers(self) -> int:
        """Of the undivided model."""
        return self.model.num_blocks + 2 if self.model.kind == "gpt" else 2 * self.model.num_blocks + 3

    def validate_ranks(self, num_ranks: int) -> None:
        """Raises ValueError for a division that does not fit the model or so many ranks."""
        strategy = self.parallel.strategy
        if strategy.num_ranks != num_ranks:
            raise ValueError(
                f"parallel: dp × tp × pp = {strategy.num_ranks} ranks are needed, and there are {num_ranks}: start as "
                "many, or change parallel"
            )
        self.straggler.validate_ranks(num_ranks)
        try:
            strategy.layout(self.tensors(), num_ranks, self.num_layers)
        except ValueError as error:
            raise ValueError(f"parallel: {error}") from error
