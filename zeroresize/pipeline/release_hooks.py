"""Hooks tell the outside that ranks are released, so that their devices can be used by others.

A hook is called with a :class:`Release` on every rank that is released, once it has given everything away, and only
there: however long it takes, and whatever it raises, the ranks that stay train on.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from zeroresize.utils.value_checks import number

logger = logging.getLogger(__name__)

#: How much of what a command prints an error shows.
_MAX_CHARS = 500


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


class CommandHook:
    """Runs a command on every rank that is released, such as ``["scontrol", "update", …]``.

    The environment tells it what has happened: ``ZERORESIZE_RANK``, ``ZERORESIZE_RELEASED`` and
    ``ZERORESIZE_REMAINING`` (ranks of the job, joined by commas), ``ZERORESIZE_MOVED_BYTES``, ``ZERORESIZE_STEP``
    (empty where it is unknown), and ``ZERORESIZE_RELEASE``, all of it as JSON.

    Args:
        command: a program and its arguments, in which ``{rank}`` and ``{step}`` are filled in; there is no shell.
        timeout_s: after so many seconds it is ended.

    Raises:
        ValueError: for no command, another field in braces, or a time limit that is not above zero.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float = 60.0) -> None:
        if not isinstance(command, list | tuple) or not command:
            raise ValueError(f"command={command!r} is not allowed: wanted are a program and its arguments, as a list")
        number("timeout_s", timeout_s, above=0.0)
        self._command, self._timeout_s = [str(one) for one in command], timeout_s
        self._filled(0, 0)

    def __call__(self, release: Release) -> None:
        """Run the command.

        Raises:
            RuntimeError: if it cannot be started, fails or takes too long; with what it has printed.
        """
        command = self._filled(release.rank, release.step)
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment_of(release)},
                timeout=self._timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise RuntimeError(f"{command} cannot be started: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{command} has not ended within {self._timeout_s:g} s") from error
        if done.returncode:
            raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stdout.strip()[-_MAX_CHARS:]}")

    def _filled(self, rank: int, step: int | None) -> list[str]:
        try:
            return [one.format(rank=rank, step="" if step is None else step) for one in self._command]
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                f"command={self._command} is not allowed: {{rank}} and {{step}} can be filled in, and braces that are "
                f"meant as such are doubled ({error!r})"
            ) from error


def environment_of(release: Release) -> dict[str, str]:
    """Return the environment variables that tell a command of a release."""
    return {
        "ZERORESIZE_RANK": str(release.rank),
        "ZERORESIZE_RELEASED": ",".join(map(str, release.released)),
        "ZERORESIZE_REMAINING": ",".join(map(str, release.remaining)),
        "ZERORESIZE_MOVED_BYTES": str(release.moved_bytes),
        "ZERORESIZE_STEP": "" if release.step is None else str(release.step),
        "ZERORESIZE_RELEASE": json.dumps(asdict(release)),
    }


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
