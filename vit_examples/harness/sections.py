"""Sections of a configuration that all training programs have, and checks of sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zeroresize.utils.value_checks import at_least, is_bool

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
        save_every: steps or epochs between two checkpoints; 0 is never, but where SIGTERM ends the run.
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
