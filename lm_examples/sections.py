"""Sections of a configuration that runs of all feeds have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from vit_examples.harness.checked_fields import Count, Natural, NonNegative, Positive, Section
from vit_examples.harness.sections import CommonOutputConfig
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.utils.value_checks import at_least, number

#: Values of a byte, which are the tokens.
NUM_BYTES = 256
Share = Annotated[float, partial(number, least=0.0, below=1.0)]
PartAbove0 = Annotated[float, partial(number, above=0.0, below=1.0)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The text, whose bytes are the tokens.

    Attributes:
        folder: all its ``.py`` files, or all its files where there are none; None for the standard library of the
            running Python.
        max_bytes: so much of it, in whole files.
        held_out: share of the files, at least one, that are for validation.
    """

    section: ClassVar[str] = "data"
    folder: str | None = None
    max_bytes: Count = 8_000_000
    held_out: PartAbove0 = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """The loop.

    Attributes:
        steps: of the optimizer, AdamW.
        lr: constant.
        grad_clip: largest norm of all gradients; 0 is off.
        dtype: of weights, gradients, optimizer and activations.
        log_every: steps between two lines of ``metrics.jsonl``; the last step has a line, too.
        validate_every: steps between two validations; 0 is at the end only.
        validation_batches: held-out batches of a validation, the same ones each time.
    """

    section: ClassVar[str] = "training"
    steps: Count = 100
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.01
    grad_clip: NonNegative = 1.0
    seed: Natural = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    log_every: Count = 10
    validate_every: Natural = 0
    validation_batches: Count = 4
    compute_dtype: ClassVar[str | None] = None

    @property
    def computing_dtype(self) -> torch.dtype:
        """In which layers compute."""
        return getattr(torch, self.compute_dtype or self.dtype)

    def is_validated_after(self, step: int) -> bool:
        """Whether a validation follows ``step``."""
        return step == self.steps or (self.validate_every > 0 and step % self.validate_every == 0)


@dataclass(frozen=True, kw_only=True)
class TokenTrainingConfig(TrainingConfig):
    """The loop, whose mini-batches have so many tokens.

    Attributes:
        tokens: of a step's mini-batch, without padding; each of them counts alike in the loss.
    """

    steps: Count = 50
    tokens: Count = 4096
    log_every: Count = 1
    validation_batches: Count = 1


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Section):
    """Whether what is slow gets less to do.

    Attributes:
        mode: ``on`` or ``off``.
        min_saving: share of a step that a change must save at least.
    """

    section: ClassVar[str] = "balance"
    mode: Literal["on", "off"] = "on"
    min_saving: Share = MIN_SAVING

    @property
    def is_on(self) -> bool:
        return self.mode == "on"


@dataclass(frozen=True, kw_only=True)
class StragglerConfig(Section):
    """A rank that is slow.

    Attributes:
        rank: None for none.
        chi: straggling skewness χ: its blocks take so many times as long.
        from_step, to_step: the first step in which it is slow, and the first one in which it no longer is; steps are
            counted from 1, and None is never.
    """

    section: ClassVar[str] = "straggler"
    rank: Natural | None = None
    chi: Annotated[float, partial(number, least=1.0)] = 2.0
    from_step: Count = 1
    to_step: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to_step is not None:
            at_least("straggler.to_step", self.to_step, self.from_step + 1)

    def validate_ranks(self, num_ranks: int) -> None:
        """Raises ValueError for a rank that is not there."""
        if self.rank is not None:
            at_least("straggler.rank", self.rank, 0, num_ranks - 1)

    def chi_of(self, step: int, rank: int) -> float:
        """χ of a rank in a step."""
        is_slow = rank == self.rank and self.from_step <= step and (self.to_step is None or step < self.to_step)
        return self.chi if is_slow else 1.0


@dataclass(frozen=True, kw_only=True)
class OutputConfig(CommonOutputConfig):
    """What a run leaves behind, under ``folder``; ``save_every`` counts steps."""

    folder: str = "runs/lm"


@dataclass(frozen=True, kw_only=True)
class CommonRunConfig:
    """What runs of all feeds have; each has sections ``model``, ``data`` and ``training`` of its kind."""

    model: Any = None
    training: Any = None
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        if self.model.vocabulary < NUM_BYTES:
            raise ValueError(
                f"model.vocabulary={self.model.vocabulary} is not allowed: tokens are bytes, so at least {NUM_BYTES} "
                "are needed"
            )

    def build(self, **options: Any) -> list[nn.Module]:
        """All layers, with weights drawn from torch's generator (none on the meta device)."""
        raise NotImplementedError

    def layers(self, device: str = "cpu", **options: Any) -> list[nn.Module]:
        """All layers, the same on every rank."""
        torch.manual_seed(self.training.seed)
        with torch.device(device):
            return [layer.to(getattr(torch, self.training.dtype)) for layer in self.build(**options)]

    def tensors(self) -> list[TensorSpec]:
        """Of the undivided model."""
        return [tensor.spec for tensor in WholeLayers(self.layers("meta")).tensors]

    def require_layouts(self, section: str, strategies: Iterable[Strategy], num_ranks: int) -> None:
        """Raises ValueError, naming the section, for strategies that do not fit the model or so many ranks."""
        tensors = self.tensors()
        for strategy in dict.fromkeys(strategies):
            try:
                strategy.layout(tensors, num_ranks, self.model.num_layers)
            except ValueError as error:
                raise ValueError(f"{section}: {error}") from error
