"""Where commands print, their tables, by rich, and what they say instead of a traceback."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from zeroresize.utils.extras import need


class CommandError(Exception):
    """Say in one line what was given wrongly, where, and what is allowed."""


def console() -> Any:
    """Return what prints texts as they are."""
    return need("zeroresize.utils.console", "cli").plain_console(markup=False, emoji=False)


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = (), bold: Collection[int] = ()
) -> Any:
    """Return a table; columns of ``numbers`` end alike, and rows ``bold`` stand out."""
    table = need("rich.table", "cli").Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for place, row in enumerate(rows):
        table.add_row(*row, style="bold" if place in bold else "")
    return table
