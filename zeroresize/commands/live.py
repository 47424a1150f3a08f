"""Watch a running job by the status that it writes: ranks' speeds and shares, who is slow since when, what that costs.

RUN is a file that a job writes by Balancer(…, on_status=zr.JsonLinesTelemetry(path)), or by zr.watch or DataBalancer,
or a folder of such files. Off a terminal a line is printed every 15 seconds. It ends with the job, or by Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from zeroresize.commands.statuses import StatusReader, changes_of, files_of
from zeroresize.commands.tables import console, table_of
from zeroresize.status import HEADINGS, Status
from zeroresize.utils.extras import need
from zeroresize.utils.progress import LINE_EVERY_S
from zeroresize.utils.texts import duration_text

#: Seconds between two looks.
_LOOK_EVERY_S = 0.5
_SPARKS, _NUM_SPARKS, _NUM_DECISIONS = "▁▂▃▄▅▆▇█", 60, 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a file, or a folder of files, of lines of JSON")
    parser.add_argument("--once", action="store_true", help="show what is there now, and end")


def run(options: argparse.Namespace) -> int:
    screen, groups = console(), [Group(path) for path in files_of(options.run)]
    for group in groups:
        group.look()
    if options.once:
        screen.print(shown(groups, screen.width))
        return 0
    live = need("rich.live", "cli").Live(shown(groups, screen.width), console=screen, auto_refresh=False)
    said: dict[Path, Status] = {}
    with live if screen.is_terminal else nullcontext():
        printed = -math.inf
        while True:
            have_ended = all(group.has_ended for group in telling(groups))
            if screen.is_terminal:
                live.update(shown(groups, screen.width), refresh=True)
            elif have_ended or time.monotonic() - printed >= LINE_EVERY_S:
                printed = time.monotonic()
                _print_lines(groups, said)
            if have_ended:
                return 0
            time.sleep(_LOOK_EVERY_S)
            for group in groups:
                group.look()


def _print_lines(groups: list[Group], said: dict[Path, Status]) -> None:
    """Print a line of each group that has told anything since what was said last."""
    for group in groups:
        status = group.newest
        if status is not None and said.get(group.path) is not status:
            said[group.path] = status
            slow = "".join(
                f"; rank {each.rank} {1.0 / each.speed:.2f} times slower"
                for each in status.ranks
                if each.slow_since is not None
            )
            print(f"{status.headline}{slow}", flush=True)


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


def telling(groups: list[Group]) -> list[Group]:
    """Return the groups that have a status; of a run's folder other files tell none. All, before any has."""
    return [group for group in groups if group.newest is not None] or groups


def shown(groups: list[Group], width: int) -> Any:
    """Return what a terminal shows of all groups; bold and dim alone, which any background bears."""
    group_of, text_of = need("rich.console", "cli").Group, need("rich.text", "cli").Text
    parts: list[Any] = []
    for group in telling(groups):
        status = group.newest
        if status is None:
            parts.append(text_of(f"{group.path}: nothing yet", style="dim"))
            continue
        ago = f"{duration_text(max(time.time() - status.time, 0.0))} ago"
        parts += [text_of(status.headline, style="bold"), text_of(f"{group.path}, {ago}", style="dim")]
        if status.ranks:
            slow = [place for place, rank in enumerate(status.ranks) if rank.slow_since is not None]
            parts.append(table_of(HEADINGS, status.rows, numbers=HEADINGS[:4], bold=slow))
        if group.steps_s:
            parts.append(text_of(f"step {sparkline(list(group.steps_s)[-max(width - 40, 8) :])}"))
        parts += [text_of(decision, style="dim") for decision in group.decisions]
    return group_of(*parts)


def sparkline(seconds: list[float]) -> str:
    """Return a character for each number, from 0 up, and the largest and the last in words."""
    most = max(seconds)
    drawn = "".join(_SPARKS[min(int(len(_SPARKS) * each / most), len(_SPARKS) - 1)] for each in seconds)
    return f"{drawn}  now {duration_text(seconds[-1])}, at most {duration_text(most)}"
