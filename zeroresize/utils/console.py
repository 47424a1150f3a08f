"""The console of commands, scripts and examples."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

#: Off a terminal, where COLUMNS does not say how long lines may be.
_LEAST_WIDTH = 400


def plain_console(**options: Any) -> Console:
    """Return rich's console with bold and dim alone, which any background bears; off a terminal no table is cut."""
    console = Console(no_color=True, highlight=False, **options)
    if not (console.is_terminal or "width" in options or "COLUMNS" in os.environ):
        console.width = max(console.width, _LEAST_WIDTH)
    return console
