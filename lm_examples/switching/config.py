"""What a run under strategies is: frozen dataclasses, each checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from lm_examples.documents import DocumentsConfig
from lm_examples.llama import LlamaConfig, llama_layers
from lm_examples.sections import CommonRunConfig, TokenTrainingConfig
from vit_examples.harness.checked_fields import Count, Positive, Read, Section, Timeout
from zeroresize.plan.strategy import LengthRange, Strategy, as_ranges

_Strategy = Annotated[Strategy, Read(Strategy.of)]
_Ranges = Annotated[tuple[LengthRange, ...], Read(as_ranges)]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TokenTrainingConfig):
    """The loop.

    Attributes:
        max_tokens: of a micro-batch, into which whole sequences are packed.
        compute_dtype: mixed precision: in which layers compute and weights travel, ``bfloat16``; those of ``dtype`` are
            what the optimizer steps. None: everything is of ``dtype``.
        gradient_dtype: in which gradients travel between strategies, ``bfloat16``; None for ``dtype``.
    """

    tokens: Count = 16384
    max_tokens: Count = 2048
    compute_dtype: Literal["bfloat16"] | None = None  # type: ignore[misc]
    gradient_dtype: Literal["bfloat16"] | None = None


@dataclass(frozen=True, kw_only=True)
class StrategiesConfig(Section):
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

    section: ClassVar[str] = "strategies"
    ranges: _Ranges | None = None
    static: _Strategy | None = None
    search: bool = False
    max_ranges: Count = 4
    optimizer_strategy: _Strategy | None = None
    overlap: bool = False
    memory_limit: Positive | None = None
    timeout_s: Timeout = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonRunConfig):
    """One run."""

    feed: str = "strategies"
    model: LlamaConfig = field(default_factory=LlamaConfig)
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategies: StrategiesConfig = field(default_factory=partial(StrategiesConfig, static=Strategy()))

    def __post_init__(self) -> None:
        super().__post_init__()
        longest, ranges = self.data.max_length, self.strategies.ranges
        if ranges and ranges[-1].up_to < longest:
            raise ValueError(
                f"strategies.ranges end at up_to={ranges[-1].up_to}: sequences have up to data.max_length={longest} "
                "tokens"
            )
        longest = max((each.up_to for each in ranges if each.max_tokens is None), default=0) if ranges else longest
        if self.training.max_tokens < longest:
            raise ValueError(
                f"training.max_tokens={self.training.max_tokens} is not allowed: a micro-batch must have room for a "
                f"whole sequence of {longest} tokens"
            )

    @property
    def ranges(self) -> tuple[LengthRange, ...]:
        """Those that are given; a static strategy is one range. ValueError where they are to be searched."""
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
        given = [each.max_tokens or 0 for each in self.strategies.ranges or () if each.strategy == strategy]
        return max(given, default=0) or self.training.max_tokens

    def token_bytes(self, number: int, share: float = 1.0) -> float:
        """Estimate of what forward of layer ``number`` keeps of one token for backward.

        Of a block the inputs, normalised inputs and outputs of both norms (6 D), and the rotary waves (head size). Of
        the rank's ``share`` of the heads and neurons: turned queries and keys (2 D), the product that values are part
        of (3 D; with fewer KV heads copies of the values, and of the keys, D (1 + KV heads / heads)), the attention's
        output and its copy (2 D); gate and up, SiLU's output and theirs together (4 M). Of the head its norm's (3 D)
        and the logits (V), which belong to the loss; of the embedding the number of the token.
        """
        model, dtype = self.model, self.training.computing_dtype
        if number == 0:
            return torch.int64.itemsize
        if number == model.num_layers - 1:
            wide = torch.promote_types(dtype, torch.float32)
            return 3 * model.hidden_size * dtype.itemsize + model.vocabulary * wide.itemsize
        are_all = model.num_kv_groups == model.num_heads
        copied = 3.0 if are_all else 1.0 + model.num_kv_groups / model.num_heads
        divided = (4.0 + copied) * model.hidden_size + 4 * model.feed_forward_size
        return (6 * model.hidden_size + model.features + share * divided) * dtype.itemsize

    def held_tokens(self, strategy: Strategy, stage: int) -> int:
        """Tokens whose activations a rank keeps at once, at most."""
        return self.max_tokens_of(strategy) * (strategy.pp - stage)

    def build(self) -> list[nn.Module]:
        """All layers."""
        return llama_layers(self.model)

    def validate_ranks(self, num_ranks: int) -> None:
        """Raises ValueError for strategies that do not fit the model or so many ranks."""
        strategies = self.strategies
        others = filter(None, (strategies.static, strategies.optimizer_strategy))
        given = [*(each.strategy for each in strategies.ranges or ()), *others]
        self.require_layouts("strategies", given, num_ranks)
