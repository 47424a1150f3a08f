"""What a run under strategies is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lm_examples.documents import DocumentsConfig
from lm_examples.llama import LlamaConfig, llama_layers
from lm_examples.sections import OutputConfig, require_bytes
from vit_examples.harness.sections import LONGEST_TIMEOUT_S, StepTrainingConfig, each_at_least
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import LengthRange, Strategy, as_ranges
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.utils.value_checks import at_least, is_bool, number, one_of


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(StepTrainingConfig):
    """The loop.

    Attributes:
        tokens: of a step's mini-batch; each of them counts alike in the loss.
        max_tokens: of a micro-batch, into which whole sequences are packed.
        compute_dtype: mixed precision: in which layers compute and weights travel, ``bfloat16``; those of ``dtype`` are
            what the optimizer steps. None: everything is of ``dtype``.
        gradient_dtype: in which gradients travel between strategies, ``bfloat16``; None for ``dtype``.
    """

    steps: int = 50
    tokens: int = 16384
    max_tokens: int = 2048
    log_every: int = 1
    validation_batches: int = 1
    compute_dtype: str | None = None
    gradient_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        each_at_least("training", self, ("tokens", "max_tokens"), 1)
        for key in ("compute_dtype", "gradient_dtype"):
            if getattr(self, key) is not None:
                one_of(f"training.{key}", getattr(self, key), ("bfloat16",))

    @property
    def computing_dtype(self) -> torch.dtype:
        """In which layers compute."""
        return getattr(torch, self.compute_dtype or self.dtype)


@dataclass(frozen=True, kw_only=True)
class StrategiesConfig:
    """Which strategy trains which lengths: exactly one of ``ranges``, ``static`` and ``search``.

    A strategy is ``[dp, tp, pp]``, or a mapping with ``ranks``, ``shares`` and ``boundaries`` besides.

    Attributes:
        ranges: such as ``[{up_to: 128, strategy: [4, 1, 1]}, {up_to: 1024, strategy: [1, 4, 1]}]``.
        static: one strategy for all lengths.
        search: measure layers and links on these ranks, and take what is expected to be fastest.
        max_ranges: that the search may take.
        optimizer_strategy: in which the optimizer steps; None for the first range's. The search finds its own.
        overlap: whether weights and gradients travel while strategies train, where memory suffices.
        memory_limit: bytes that a rank may hold, which ``--dry-run`` and the beginning of a run check; None for none.
        timeout_s: seconds after which a message that does not come fails.
    """

    ranges: tuple[LengthRange, ...] | None = None
    static: Strategy | None = None
    search: bool = False
    max_ranges: int = 4
    optimizer_strategy: Strategy | None = None
    overlap: bool = False
    memory_limit: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for key in ("search", "overlap"):
            is_bool(f"strategies.{key}", getattr(self, key))
        at_least("strategies.max_ranges", self.max_ranges, 1)
        chosen = [key for key in ("ranges", "static", "search") if getattr(self, key)]
        if len(chosen) != 1:
            given = " and ".join(chosen) or "none of them"
            raise ValueError(
                f"strategies: one of ranges, static and search: true is needed, found {given}; on the command line "
                "--set strategies.search=true, or strategies.static=[dp, tp, pp], takes the place of what a file says"
            )
        if self.search and self.optimizer_strategy:
            raise ValueError(
                "strategies.optimizer_strategy does not go with search: true, which finds it: leave it out"
            )
        self._read("ranges", as_ranges)
        self._read("static", Strategy.of)
        self._read("optimizer_strategy", Strategy.of)
        if self.memory_limit is not None:
            number("strategies.memory_limit", self.memory_limit, above=0.0)
        number("strategies.timeout_s", self.timeout_s, above=0.0, most=LONGEST_TIMEOUT_S)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, strategies as mappings."""
        return {
            **vars(self),
            "ranges": None if self.ranges is None else [one.as_dict() for one in self.ranges],
            "static": self.static and self.static.as_dict(),
            "optimizer_strategy": self.optimizer_strategy and self.optimizer_strategy.as_dict(),
        }

    def _read(self, key: str, read: Any) -> None:
        value = getattr(self, key)
        if value is None:
            return
        if key == "ranges" and not isinstance(value, list | tuple):
            raise ValueError(f"strategies.ranges={value!r}: a list of ranges is needed")
        try:
            object.__setattr__(self, key, read(value))
        except ValueError as error:
            raise ValueError(f"strategies.{key}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    feed: str = "strategies"
    model: LlamaConfig = field(default_factory=LlamaConfig)
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategies: StrategiesConfig = field(default_factory=lambda: StrategiesConfig(static=Strategy()))
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require_bytes(self.model.vocabulary)
        longest, ranges = self.data.max_length, self.strategies.ranges
        if ranges and ranges[-1].up_to < longest:
            raise ValueError(
                f"strategies.ranges end at up_to={ranges[-1].up_to}: sequences have up to data.max_length={longest} "
                "tokens"
            )
        longest = max((one.up_to for one in ranges or () if one.max_tokens is None), default=0) if ranges else longest
        if self.training.max_tokens < longest:
            raise ValueError(
                f"training.max_tokens={self.training.max_tokens} is not allowed: a micro-batch must have room for a "
                f"whole sequence of {longest} tokens"
            )

    @property
    def ranges(self) -> tuple[LengthRange, ...]:
        """Those that are given; a static strategy is one range.

        Raises:
            ValueError: where they are to be searched.
        """
        strategies = self.strategies
        if strategies.search:
            raise ValueError("strategies.search=true: ranges are found on the ranks that train")
        return strategies.ranges or (LengthRange(self.data.max_length, strategies.static),)

    @property
    def optimizer_strategy(self) -> Strategy:
        """In which the optimizer steps."""
        return self.strategies.optimizer_strategy or self.ranges[0].strategy

    def max_tokens_of(self, strategy: Strategy) -> int:
        """Of a micro-batch under a strategy, at most."""
        ranges = self.strategies.ranges or ()
        return max((one.max_tokens or 0 for one in ranges if one.strategy == strategy), default=0) or (
            self.training.max_tokens
        )

    def tensors(self) -> list[TensorSpec]:
        """Of the whole model."""
        with torch.device("meta"):
            layers = [one.to(getattr(torch, self.training.dtype)) for one in llama_layers(self.model)]
        return [one.spec for one in WholeLayers(layers).tensors]

    @property
    def timeout_s(self) -> float:
        """Seconds after which a message that does not come fails."""
        return self.strategies.timeout_s

    @property
    def num_layers(self) -> int:
        """Blocks, embedding and head."""
        return self.model.num_blocks + 2

    def validate_ranks(self, num_ranks: int) -> None:
        """Raises ValueError for strategies that do not fit the model or so many ranks."""
        strategies = self.strategies
        others = filter(None, (strategies.static, strategies.optimizer_strategy))
        given = [*(one.strategy for one in strategies.ranges or ()), *others]
        tensors = self.tensors()
        for strategy in dict.fromkeys(given):
            try:
                strategy.layout(tensors, num_ranks, self.num_layers)
            except ValueError as error:
                raise ValueError(f"strategies: {error}") from error
