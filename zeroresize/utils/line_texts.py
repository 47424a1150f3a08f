"""Numbers as lines of the log tell them."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Return seconds with two digits that count, for a line."""
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"


def percent_text(share: float) -> str:
    """Return a share as whole per cent, for a line."""
    return f"{share:.0%}".replace("%", " %")
