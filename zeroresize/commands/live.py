"""Watch a running job by the status that it writes: ranks' speeds and shares, who is slow since when, what that costs.

RUN is a file that a job writes by Balancer(…, on_status=zr.JsonLinesTelemetry(path)), or by zr.watch or DataBalancer,
or a folder of such files. Off a terminal a line is printed every 15 seconds. It ends with the job, or by Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from zeroresize.commands.errors import need
from zeroresize.commands.statuses import StatusReader, changes_of, files_of
from zeroresize.status import HEADINGS, Status
from zeroresize.utils.texts import duration_text

#: Seconds between two looks, and between two lines off a terminal.
_LOOK_EVERY_S, _LINE_EVERY_S = 0.5, 15.0
_SPARKS, _NUM_SPARKS, _NUM_DECISIONS = "▁▂▃▄▅▆▇█", 60, 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a file, or a folder of files, of lines of JSON")
    parser.add_argument("--once", action="store_true", help="show what is there now, and end")


def run(options: argparse.Namespace) -> int:
    rich_console = need("rich.console", "cli")
    console = rich_console.Console()
    groups = [Group(path) for path in files_of(options.run)]
    for group in groups:
        group.look()
    if options.once:
        console.print(shown(groups, console.width))
        return 0
    if not console.is_terminal:
        return _lines(groups)
    live = need("rich.live", "cli")
    with live.Live(shown(groups, console.width), console=console, auto_refresh=False) as view:
        while not all(group.has_ended for group in groups):
            time.sleep(_LOOK_EVERY_S)
            for group in groups:
                group.look()
            view.update(shown(groups, console.width), refresh=True)
    return 0


class Group:
    """What one file has told so far: the newest status, steps' seconds, and what was decided."""

    def __init__(self, path: Path) -> None:
        self._reader, self.path = StatusReader(path), path
        self.newest: Status | None = None
        self.steps_s = deque[float](maxlen=_NUM_SPARKS)
        self.decisions = deque[str](maxlen=_NUM_DECISIONS)

    def look(self) -> None:
        """Take what is new."""
        for status in self._reader.new():
            if not math.isnan(status.step_s):
                self.steps_s.append(status.step_s)
            known = [self.newest] if self.newest is not None else []
            self.decisions += [f"step {now.step}: {now.decided}" for _, now in changes_of([*known, status])]
            self.newest = status

    @property
    def has_ended(self) -> bool:
        """Whether its job has said so."""
        return self.newest is not None and self.newest.state == "ended"

    @property
    def age(self) -> str:
        """How long ago it last said anything."""
        return "" if self.newest is None else f"{duration_text(max(time.time() - self.newest.time, 0.0))} ago"


def shown(groups: list[Group], width: int) -> Any:
    """Return what a terminal shows of all groups; bold and dim alone, which any background bears."""
    group_of, table_of, text_of = (need(f"rich.{name}", "cli") for name in ("console", "table", "text"))
    parts: list[Any] = []
    for group in groups:
        status = group.newest
        if status is None:
            parts.append(text_of.Text(f"{group.path}: nothing yet", style="dim"))
            continue
        parts.append(text_of.Text(status.headline, style="bold"))
        parts.append(text_of.Text(f"{group.path}, {group.age}", style="dim"))
        table = table_of.Table(box=None, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading in HEADINGS[:4] else "left")
        for rank, row in zip(status.ranks, status.rows, strict=True):
            table.add_row(*row, style="" if rank.slow_since is None else "bold")
        parts += [table] if status.ranks else []
        if group.steps_s:
            parts.append(text_of.Text(f"step {sparkline(list(group.steps_s)[-max(width - 40, 8) :])}"))
        parts += [text_of.Text(decision, style="dim") for decision in group.decisions]
    return group_of.Group(*parts)


def sparkline(seconds: list[float]) -> str:
    """Return a character for each number, from 0 up, and the largest and the last in words."""
    most = max(seconds)
    blocks = "".join(_SPARKS[min(int(len(_SPARKS) * each / most), len(_SPARKS) - 1)] for each in seconds)
    return f"{blocks}  now {duration_text(seconds[-1])}, at most {duration_text(most)}"


def _lines(groups: list[Group]) -> int:
    said: dict[Path, int] = {}
    while True:
        for group in groups:
            status = group.newest
            if status is not None and said.get(group.path) != status.step:
                said[group.path] = status.step
                are_slow = [each for each in status.ranks if each.slow_since is not None]
                slow = ", ".join(f"rank {each.rank} {1.0 / each.speed:.2f} times slower" for each in are_slow)
                print(f"{status.headline}{f'; {slow}' if slow else ''}", flush=True)
        if all(group.has_ended for group in groups):
            return 0
        waited_s = 0.0
        while waited_s < _LINE_EVERY_S and not all(group.has_ended for group in groups):
            time.sleep(_LOOK_EVERY_S)
            waited_s += _LOOK_EVERY_S
            for group in groups:
                group.look()
        sys.stdout.flush()
