"""What a command says instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """Say in one line what was given wrongly, where, and what is allowed."""
