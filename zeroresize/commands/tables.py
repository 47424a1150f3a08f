"""Where commands print, and their tables, by rich."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from zeroresize.utils.extras import need


def console() -> Any:
    """Return what prints texts as they are."""
    return need("zeroresize.utils.console", "cli").plain_console(markup=False, emoji=False)


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = (), bold: Collection[int] = ()
) -> Any:
    """Return a table; columns of ``numbers`` end alike, and rows ``bold`` stand out."""
    table = need("rich.table", "cli").Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        justify = "right" if heading in numbers else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=place == 0)  # no name is cut
    for place, row in enumerate(rows):
        table.add_row(*row, style="bold" if place in bold else "")
    return table
