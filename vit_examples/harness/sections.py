"""Sections of a configuration that all training programs have, and checks of sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zeroresize.utils.value_checks import at_least, is_bool, number, one_of

DTYPES = ("float32", "float64", "bfloat16")
LONGEST_TIMEOUT_S = 1e6


def each_at_least(section: str, values: Any, keys: Iterable[str], least: int) -> None:
    """Check several keys of a section.

    Args:
        values: what has them as attributes.
    """
    for key in keys:
        at_least(f"{section}.{key}", getattr(values, key), least)


@dataclass(frozen=True, kw_only=True)
class CommonOutputConfig:
    """What a run leaves behind, under ``folder``.

    Attributes:
        save_every: steps or epochs between two checkpoints; 0 is never.
        keep: so many newest checkpoints are kept.
        progress: show a progress bar and tables on rank 0.
    """

    folder: str = "runs"
    save_every: int = 0
    keep: int = 2
    progress: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str) or not self.folder:
            raise ValueError(f"output.folder={self.folder!r}: the name of a folder is needed")
        is_bool("output.progress", self.progress)
        at_least("output.save_every", self.save_every, 0)
        at_least("output.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class StepTrainingConfig:
    """A loop of steps.

    Attributes:
        steps: of the optimizer, AdamW.
        lr: constant.
        grad_clip: largest norm of all gradients; 0 is off.
        dtype: of weights, gradients, optimizer and activations.
        log_every: steps between two lines of ``metrics.jsonl``; the last step has a line, too.
        validate_every: steps between two validations; 0 is at the end only.
        validation_batches: held-out batches of a validation, the same ones each time.
    """

    steps: int = 100
    lr: float = 1e-3
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    log_every: int = 10
    validate_every: int = 0
    validation_batches: int = 4

    def __post_init__(self) -> None:
        each_at_least("training", self, ("steps", "log_every", "validation_batches"), 1)
        each_at_least("training", self, ("seed", "validate_every"), 0)
        for key in ("weight_decay", "grad_clip"):
            number(f"training.{key}", getattr(self, key), least=0.0)
        number("training.lr", self.lr, above=0.0)
        one_of("training.dtype", self.dtype, DTYPES)

    def is_validated_after(self, step: int) -> bool:
        """Whether a validation follows ``step``."""
        return step == self.steps or (self.validate_every > 0 and step % self.validate_every == 0)
