"""Sections of a configuration that runs of all feeds have."""

from __future__ import annotations

from dataclasses import dataclass

from vit_examples.harness.sections import CommonOutputConfig
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.utils.value_checks import at_least, number, one_of

#: Values of a byte, which are the tokens.
NUM_BYTES = 256


def require_bytes(vocabulary: int) -> None:
    """Raise ValueError where a model's vocabulary has no room for the bytes that are the tokens."""
    if vocabulary < NUM_BYTES:
        raise ValueError(
            f"model.vocabulary={vocabulary} is not allowed: tokens are bytes, so at least {NUM_BYTES} are needed"
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, whose bytes are the tokens.

    Attributes:
        folder: all its ``.py`` files, or all its files where there are none; None for the standard library of the
            running Python.
        max_bytes: so much of it, in whole files.
        held_out: share of the files, at least one, that are for validation.
    """

    folder: str | None = None
    max_bytes: int = 8_000_000
    held_out: float = 0.05

    def __post_init__(self) -> None:
        if self.folder is not None and (not isinstance(self.folder, str) or not self.folder):
            raise ValueError(f"data.folder={self.folder!r}: the name of a folder is needed, or nothing")
        at_least("data.max_bytes", self.max_bytes, 1)
        number("data.held_out", self.held_out, above=0.0, below=1.0)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Whether what is slow gets less to do.

    Attributes:
        mode: ``on`` or ``off``.
        min_saving: share of a step that a change must save at least.
    """

    mode: str = "on"
    min_saving: float = MIN_SAVING

    def __post_init__(self) -> None:
        one_of("balance.mode", self.mode, ("on", "off"))
        number("balance.min_saving", self.min_saving, least=0.0, below=1.0)

    @property
    def is_on(self) -> bool:
        return self.mode == "on"


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """A rank that is slow.

    Attributes:
        rank: None for none.
        chi: straggling skewness χ: its blocks take so many times as long.
        from_step, to_step: the first step in which it is slow, and the first one in which it no longer is; steps are
            counted from 1, and None is never.
    """

    rank: int | None = None
    chi: float = 2.0
    from_step: int = 1
    to_step: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            at_least("straggler.rank", self.rank, 0)
        number("straggler.chi", self.chi, least=1.0)
        at_least("straggler.from_step", self.from_step, 1)
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
