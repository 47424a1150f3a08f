"""What a run in a pipeline is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import nn

from lm_examples.cases import CASES
from lm_examples.cases.dynamic_case import CaseConfig, DynamicCase
from lm_examples.gpt import ModelConfig
from lm_examples.needs import first_boundaries
from lm_examples.sections import BalanceConfig, CommonRunConfig, DataConfig, StragglerConfig, TrainingConfig
from vit_examples.harness.checked_fields import Count, Natural, NonNegative, Positive, Section, Timeout
from zeroresize.pipeline import Release, Repack
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.pipeline.profile_cadence import MAX_MEASURING
from zeroresize.policy.pipeline.rebalancing import By
from zeroresize.utils.value_checks import divides


@dataclass(frozen=True, kw_only=True)
class PipelineTrainingConfig(TrainingConfig):
    """The loop.

    Attributes:
        batch_size: sequences of a step, shared by ``micro_batches``.
    """

    batch_size: Count = 16
    micro_batches: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        divides("training.batch_size", self.batch_size, "training.micro_batches", self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """The stages.

    Attributes:
        boundaries: which layers each stage begins with: equally many for each (``uniform``), equally many parameters
            (``parameters``), or a list as [0, 4, 10]: stage s has the layers from entry s up to entry s + 1.
        timeout_s: seconds after which a message that does not come fails.
    """

    section: ClassVar[str] = "pipeline"
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    boundaries: Literal["uniform", "parameters"] | tuple[Natural, ...] = "parameters"
    timeout_s: Timeout = 600.0


@dataclass(frozen=True, kw_only=True)
class RepackConfig(Section):
    """Whether ranks are released when fewer stages suffice; see :class:`zeroresize.pipeline.Repack`.

    Attributes:
        mode: ``on`` or ``off``.
        max_slowdown: None for no limit; then ``balance.memory_limits`` are needed.
        release_command: words of a command that tells the outside, run on each released rank, in which ``{rank}`` and
            ``{step}`` are filled in; None for none.
    """

    section: ClassVar[str] = "repack"
    mode: Literal["on", "off"] = "off"
    least_stages: Count = 1
    max_slowdown: Positive | None = None
    release_command: tuple[str, ...] | None = None

    @property
    def is_on(self) -> bool:
        return self.mode == "on"

    def options(self) -> Repack | None:
        """For a balancer; None where it is off."""
        hooks = () if self.release_command is None else (self._tell,)
        most = math.inf if self.max_slowdown is None else self.max_slowdown
        return Repack(self.least_stages, most, hooks) if self.is_on else None

    def _tell(self, release: Release) -> None:
        """Run the command; what it raises is a warning."""
        words = [word.format(rank=release.rank, step=release.step) for word in self.release_command or ()]
        subprocess.run(words, check=True, timeout=60.0, stdin=subprocess.DEVNULL)


@dataclass(frozen=True, kw_only=True)
class PipelineBalanceConfig(BalanceConfig):
    """Whether layers move, and when; see :class:`zeroresize.pipeline.PipelineBalancer`.

    Attributes:
        profile_every: steps from one profile to the next, at least; ``auto`` for as few as ``max_measuring`` allows.
        max_measuring: share of the steps' time that measuring may take; None for any.
        count_work: ``on`` or ``off``: whether profiles tell the mean step, by the work that blocks count, in cases that
            change it in every step.
        memory_limits: bytes, one for each stage.
    """

    by: By = "time"
    profile_every: Literal["auto"] | Count = "auto"
    max_measuring: Positive | None = MAX_MEASURING
    count_work: Literal["on", "off"] = "on"
    memory_limits: tuple[Positive, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SleepConfig(Section):
    """Sleeps for machines with fewer cores than stages, see :mod:`lm_examples.pace`.

    Attributes:
        forward_s: seconds of a dense block in forward of one micro-batch, and twice as long in backward; 0 is off.
    """

    section: ClassVar[str] = "sleep"
    forward_s: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonRunConfig):
    """One run."""

    feed: str = "pipeline"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: PipelineTrainingConfig = field(default_factory=PipelineTrainingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    balance: PipelineBalanceConfig = field(default_factory=PipelineBalanceConfig)
    repack: RepackConfig = field(default_factory=RepackConfig)
    case: CaseConfig = field(default_factory=CaseConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repack.is_on and not self.balance.is_on:
            raise ValueError("repack.mode=on goes with balance.mode=on")
        if self.repack.is_on and self.repack.max_slowdown is None and self.balance.memory_limits is None:
            raise ValueError("repack.mode=on needs balance.memory_limits or repack.max_slowdown, else no stage stays")

    def build(self, *, case: DynamicCase | None = None) -> list[nn.Module]:
        """All layers, of a case's object where there is one already."""
        case = case or self.make_case()
        return [case.embedding(), *map(case.block, range(self.model.num_blocks)), case.head()]

    def tensors(self) -> list[TensorSpec]:
        """Of the undivided model; no layer is divided."""
        return [
            TensorSpec(f"{number}.{name}", number, tuple(parameter.shape), parameter.element_size())
            for number, layer in enumerate(self.layers("meta"))
            for name, parameter in layer.named_parameters()
        ]

    def token_bytes(self, number: int, share: float = 1.0) -> float:
        """Estimate of what forward of layer ``number`` keeps of one token for backward, with all work done.

        Of a block the inputs, normalised inputs and outputs of both layer norms and of the attention (5 D), q, k and v
        (3 D), and the outputs of the first product and of GELU (2 M); of the head its norm's input and output (2 D) and
        the logits (V), which belong to the loss; of the embedding the number of the token.
        """
        model, itemsize = self.model, self.training.computing_dtype.itemsize
        if number == 0:
            return torch.int64.itemsize
        if number == model.num_layers - 1:
            return (2 * model.hidden_size + model.vocabulary) * itemsize
        return (8 * model.hidden_size + 2 * model.feed_forward_size) * itemsize

    def held_tokens(self, strategy: Strategy, stage: int) -> int:
        """Tokens whose activations a stage keeps at once, at most."""
        training = self.training
        held = training.micro_batches if self.pipeline.schedule == "gpipe" else strategy.pp - stage
        return min(held, training.micro_batches) * (training.batch_size // training.micro_batches) * self.model.context

    def make_case(self) -> DynamicCase:
        """The case that is asked for; ValueError if its options do not fit the model."""
        return CASES[self.case.name](self.model, self.case)

    def validate_ranks(self, num_stages: int) -> None:
        """Raises ValueError for what ``num_stages`` stages cannot run."""
        num_layers = self.model.num_layers
        if num_layers < num_stages:
            raise ValueError(
                f"model.num_blocks={self.model.num_blocks} makes {num_layers} layers, embedding and head "
                f"included: {num_stages} stages need at least one for each"
            )
        try:
            first_boundaries(self.pipeline.boundaries, self.layers("meta"), num_stages)
        except ValueError as error:
            raise ValueError(f"pipeline.boundaries: {error}") from error
        limits = self.balance.memory_limits
        if limits is not None and len(limits) != num_stages:
            raise ValueError(f"balance.memory_limits are {len(limits)}, not one of each of {num_stages} stages")
        self.straggler.validate_ranks(num_stages)
        self.make_case()
