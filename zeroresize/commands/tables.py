"""Where commands print, and their tables, by rich: bold and dim alone, which any background bears."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from zeroresize.utils.extras import need


def console() -> Any:
    """Return what prints texts as they are; off a terminal 120 characters wide, or as COLUMNS says."""
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS") or 120)
    return need("rich.console", "cli").Console(width=width, highlight=False, markup=False, emoji=False)


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = (), bold: Collection[int] = ()
) -> Any:
    """Return a table; columns of ``numbers`` end alike, and rows ``bold`` stand out."""
    table = need("rich.table", "cli").Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for place, row in enumerate(rows):
        table.add_row(*row, style="bold" if place in bold else "")
    return table
