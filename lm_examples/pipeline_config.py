"""What a run in a pipeline is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lm_examples.cases import CASES, case_class
from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.gpt import ModelConfig
from lm_examples.sections import BalanceConfig, DataConfig, OutputConfig, StragglerConfig, require_bytes
from vit_examples.harness.sections import LONGEST_TIMEOUT_S, StepTrainingConfig, each_at_least
from zeroresize.pipeline import Release, Repack
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.profile_cadence import MAX_MEASURING, ProfileEvery
from zeroresize.policy.pipeline.rebalancing import By
from zeroresize.utils.value_checks import at_least, divides, known_keys, number, one_of

SCHEDULES = ("1f1b", "gpipe")
BOUNDARIES = ("uniform", "parameters")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(StepTrainingConfig):
    """The loop.

    Attributes:
        batch_size: sequences of a step, shared by ``micro_batches``.
    """

    batch_size: int = 16
    micro_batches: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        each_at_least("training", self, ("batch_size", "micro_batches"), 1)
        divides("training.batch_size", self.batch_size, "training.micro_batches", self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The stages.

    Attributes:
        boundaries: which layers each stage begins with: equally many for each (``uniform``), equally many parameters
            (``parameters``), or a list as [0, 4, 10]: stage s has the layers from entry s up to entry s + 1.
        timeout_s: seconds after which a message that does not come fails.
    """

    schedule: str = "1f1b"
    boundaries: str | tuple[int, ...] = "parameters"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        one_of("pipeline.schedule", self.schedule, SCHEDULES)
        number("pipeline.timeout_s", self.timeout_s, above=0.0, most=LONGEST_TIMEOUT_S)
        if isinstance(self.boundaries, list | tuple):
            for boundary in self.boundaries:
                at_least("pipeline.boundaries", boundary, 0)
            object.__setattr__(self, "boundaries", tuple(self.boundaries))
        elif self.boundaries not in BOUNDARIES:
            raise ValueError(
                f"pipeline.boundaries={self.boundaries!r} is not allowed: choose one of {list(BOUNDARIES)}, or a list "
                "of layers such as [0, 4, 10]"
            )


@dataclass(frozen=True, kw_only=True)
class RepackConfig:
    """Whether ranks are released when fewer stages suffice; see :class:`zeroresize.pipeline.Repack`.

    Attributes:
        mode: ``on`` or ``off``.
        max_slowdown: None for no limit; then ``balance.memory_limits`` are needed.
        release_command: words of a command that tells the outside, run on each released rank, in which ``{rank}`` and
            ``{step}`` are filled in; None for none.
    """

    mode: str = "off"
    least_stages: int = 1
    max_slowdown: float | None = None
    release_command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        one_of("repack.mode", self.mode, ("on", "off"))
        at_least("repack.least_stages", self.least_stages, 1)
        if self.max_slowdown is not None:
            number("repack.max_slowdown", self.max_slowdown, above=0.0)
        if self.release_command is not None:
            if not isinstance(self.release_command, list | tuple) or not self.release_command:
                raise ValueError(f"repack.release_command={self.release_command!r}: a list of words is needed")
            object.__setattr__(self, "release_command", tuple(map(str, self.release_command)))

    @property
    def is_on(self) -> bool:
        return self.mode == "on"

    def options(self) -> Repack | None:
        """For a balancer; None where it is off."""
        if not self.is_on:
            return None
        hooks = () if self.release_command is None else (self._tell,)
        most = math.inf if self.max_slowdown is None else self.max_slowdown
        return Repack(self.least_stages, most, hooks)

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
    profile_every: ProfileEvery = "auto"
    max_measuring: float | None = MAX_MEASURING
    count_work: str = "on"
    memory_limits: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("balance.by", self.by, get_args(By))
        if self.profile_every != "auto":
            at_least("balance.profile_every", self.profile_every, 1, otherwise='"auto"')
        if self.max_measuring is not None:
            number("balance.max_measuring", self.max_measuring, above=0.0)
        one_of("balance.count_work", self.count_work, ("on", "off"))
        if self.memory_limits is not None:
            if not isinstance(self.memory_limits, list | tuple):
                raise ValueError(f"balance.memory_limits={self.memory_limits!r}: a list of bytes is needed")
            for limit in self.memory_limits:
                number("balance.memory_limits", limit, above=0.0)
            object.__setattr__(self, "memory_limits", tuple(map(float, self.memory_limits)))


@dataclass(frozen=True, kw_only=True)
class CaseConfig:
    """What changes the work of layers.

    Attributes:
        name: one of :data:`lm_examples.cases.CASES`.
        options: of the case's class ``Options``; in YAML they stand beside the name. None for its defaults.
    """

    name: str = "none"
    options: Any = None

    def __post_init__(self) -> None:
        one_of("case.name", self.name, list(CASES))
        if self.options is None:
            object.__setattr__(self, "options", case_class(self.name).Options())

    @classmethod
    def from_dict(cls, values: Any) -> CaseConfig:
        """Read plain values: which options there are depends on the name."""
        if not isinstance(values, Mapping):
            raise ValueError(f"case={values!r}: expected a mapping such as {{name: pruning}}")
        name = values.get("name", "none")
        one_of("case.name", name, list(CASES))
        kind = case_class(name).Options
        known_keys(f"key of case {name!r}", values, ["name", *(one.name for one in dataclasses.fields(kind))])
        return cls(name=name, options=kind(**{key: value for key, value in values.items() if key != "name"}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the options stand beside the name."""
        return {"name": self.name, **dataclasses.asdict(self.options)}


@dataclass(frozen=True, kw_only=True)
class SleepConfig:
    """Sleeps for machines with fewer cores than stages, see :mod:`lm_examples.pace`.

    Attributes:
        forward_s: seconds that a dense block sleeps in forward of one micro-batch, and twice as long in backward; 0 is
            off.
    """

    forward_s: float = 0.0

    def __post_init__(self) -> None:
        number("sleep.forward_s", self.forward_s, least=0.0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    feed: str = "pipeline"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    balance: PipelineBalanceConfig = field(default_factory=PipelineBalanceConfig)
    repack: RepackConfig = field(default_factory=RepackConfig)
    case: CaseConfig = field(default_factory=CaseConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    sleep: SleepConfig = field(default_factory=SleepConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require_bytes(self.model.vocabulary)
        if self.repack.is_on and not self.balance.is_on:
            raise ValueError("repack.mode=on goes with balance.mode=on")
        if self.repack.is_on and self.repack.max_slowdown is None and self.balance.memory_limits is None:
            raise ValueError("repack.mode=on needs balance.memory_limits or repack.max_slowdown, else no stage stays")

    @property
    def timeout_s(self) -> float:
        """Seconds after which a message that does not come fails."""
        return self.pipeline.timeout_s

    @property
    def num_layers(self) -> int:
        """Blocks, embedding and head."""
        return self.model.num_blocks + 2

    def make_case(self) -> DynamicCase:
        """The case that is asked for.

        Raises:
            ValueError: if its options do not fit the model.
        """
        return case_class(self.case.name)(self.model, self.case.options)

    def validate_ranks(self, num_stages: int) -> None:
        """Raises ValueError for what ``num_stages`` stages cannot run."""
        if self.num_layers < num_stages:
            raise ValueError(
                f"model.num_blocks={self.model.num_blocks} makes {self.num_layers} layers, embedding and head "
                f"included: {num_stages} stages need at least one for each"
            )
        if isinstance(self.pipeline.boundaries, tuple):
            try:
                Partition.of(self.pipeline.boundaries, self.num_layers, num_stages)
            except ValueError as error:
                raise ValueError(f"pipeline.boundaries: {error}") from error
        limits = self.balance.memory_limits
        if limits is not None and len(limits) != num_stages:
            raise ValueError(f"balance.memory_limits are {len(limits)}, not one of each of {num_stages} stages")
        self.straggler.validate_ranks(num_stages)
        self.make_case()
