"""What commands, scripts and examples print is whole in a log, and in no colour on a terminal."""

import io

from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from zeroresize.utils.console import plain_console


def test_off_a_terminal_no_table_is_cut_but_where_columns_says_how_wide_it_is(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*(f"a heading with number {number}" for number in range(12)))
    for columns, is_whole in ((None, True), ("60", False)):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        stream = io.StringIO()
        plain_console(file=stream).print(table)
        assert ("a heading with number 11" in stream.getvalue()) == is_whole


def test_on_a_terminal_there_is_bold_and_dim_and_no_colour():
    stream = io.StringIO()
    console = plain_console(file=stream, force_terminal=True, width=100)
    columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        progress.update(progress.add_task("", total=2), completed=1, refresh=True)
    console.print(Table("heading", title="title"), "a number 12 and 'a text'")
    console.print("[bold red]wrong[/]")
    codes = {code for part in stream.getvalue().split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
    assert "1" in codes
    assert not any(code.isdigit() and (30 <= int(code) <= 49 or int(code) >= 90) for code in codes), codes
