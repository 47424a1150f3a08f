"""What a command says instead of a traceback."""

from __future__ import annotations

from pathlib import Path


class CommandError(Exception):
    """Say in one line what was given wrongly, where, and what is allowed."""


def require_within(option: str, value: float, least: float, most: float) -> None:
    """Check a number."""
    if not least <= value <= most:
        raise CommandError(f"{option} {value:g} is not allowed: a number from {least:g} to {most:g} is needed")


def write(option: str, path: Path, text: str) -> None:
    """Write a file that an option names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path}: cannot be written: {error.strerror}") from error
