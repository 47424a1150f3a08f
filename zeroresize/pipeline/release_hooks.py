"""Hooks tell the outside that ranks are released, so that their devices can be used by others.

A hook is called with a :class:`Release` on every rank that is released, once it has given everything away, and only
there: however long it takes, and whatever it raises, the ranks that stay train on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """Describes the release of this rank. Ranks are counted over the whole job.

    Attributes:
        rank: this one.
        released: all that are released with it.
        remaining: of its pipeline.
        moved_bytes: that the re-packing has moved, of all ranks together.
        step: after which it was, where that is known.
    """

    rank: int
    released: tuple[int, ...]
    remaining: tuple[int, ...]
    moved_bytes: int
    step: int | None = None


#: Tells the outside.
ReleaseHook = Callable[[Release], object]


def tell_outside(hooks: Iterable[ReleaseHook], release: Release) -> None:
    """Call all hooks; what one raises is a warning."""
    for hook in hooks:
        try:
            hook(release)
        except Exception as error:
            logger.warning(
                "rank %d is released, but the outside has not been told: %s: %s",
                release.rank,
                type(hook).__name__,
                error,
            )
