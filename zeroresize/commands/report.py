"""Tell of one or more runs in one HTML file: did balancing pay, who was slow and when, where the work was, and why.

RUN is what `zeroresize live` reads: a file that a job wrote by on_status=zr.JsonLinesTelemetry(path), or a folder of
such files. The page needs no server and no network.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroresize.commands import pictures
from zeroresize.commands.errors import CommandError, need
from zeroresize.commands.statuses import changes_of, statuses_of
from zeroresize.status import HEADINGS, Status
from zeroresize.utils.texts import CAUSES, duration_text, percent_text

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a file, or a folder of files, of lines of JSON")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(options: argparse.Namespace) -> int:
    runs = [Run(str(path), statuses) for path, statuses in statuses_of(options.run).items()]
    page = page_of(runs)
    try:
        options.out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out={options.out} cannot be written: {error.strerror}") from error
    for each in runs:
        print(f"{each.name}: {each.verdict}")
    print(f"written to {options.out}")
    return 0


@dataclass(frozen=True)
class Slowness:
    """A time for which a rank was slow."""

    rank: int
    from_step: int
    to_step: int
    times: float
    cause: str
    cost_s: float


class Run:
    """What one file of statuses tells."""

    def __init__(self, name: str, statuses: Sequence[Status]) -> None:
        self.name, self.statuses, self.last = name, statuses, statuses[-1]

    @property
    def verdict(self) -> str:
        """Whether balancing paid, in one sentence."""
        last, spent_s = self.last, self.last.time - self.statuses[0].time
        if last.kind == "nothing":
            cost = f"slow ranks cost {duration_text(last.cost_s)}" if last.cost_s > 0.0 else "no rank was slow for long"
            return f"{cost} of {duration_text(spent_s)}; nothing was balanced"
        if math.isnan(last.saved_s):
            return f"{last.kind} were balanced; what that saved this kind does not tell"
        if last.saved_s <= 0.0:
            return f"balancing saved nothing yet ({duration_text(last.saved_s)} of {duration_text(spent_s)})"
        share = last.saved_s / (spent_s + last.saved_s)
        return (
            f"balancing saved {duration_text(last.saved_s)}: {duration_text(spent_s)} would have been "
            f"{duration_text(spent_s + last.saved_s)}, {percent_text(share)} more"
            if spent_s > 0.0
            else f"balancing saved {duration_text(last.saved_s)}"
        )

    @property
    def end(self) -> str:
        """Whether it has ended, as far as it says so."""
        return "has ended" if self.last.state == "ended" else f"last heard of at step {self.last.step}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Numbers of the whole run, by name."""
        steps_s = sorted(status.step_s for status in self.statuses if not math.isnan(status.step_s)) or [math.nan]
        middle_s = statistics.median(steps_s)
        return [
            ("steps", f"{self.last.step}, {self.end}"),
            ("time", duration_text(self.last.time - self.statuses[0].time)),
            ("ranks", str(len(self.last.ranks))),
            ("a step: shortest, middle, longest", ", ".join(map(duration_text, (steps_s[0], middle_s, steps_s[-1])))),
            ("saved", duration_text(self.last.saved_s)),
            ("cost of slow ranks", duration_text(self.last.cost_s)),
        ]

    @property
    def slownesses(self) -> list[Slowness]:
        """Who was slow from which step to which, in order."""
        seen: dict[tuple[int, int], Slowness] = {}
        for status in self.statuses:
            for each in status.ranks:
                if each.slow_since is not None:
                    cause = CAUSES.get(each.cause, each.cause)
                    key = each.rank, each.slow_since
                    seen[key] = Slowness(*key, status.step, 1.0 / each.speed, cause, each.cost_s)
        return sorted(seen.values(), key=lambda each: (each.from_step, each.rank))

    @property
    def decisions(self) -> list[tuple[int, str]]:
        """What was decided after which step, each time that work was divided otherwise."""
        return [(after.step, after.decided) for before, after in changes_of(self.statuses)]

    @property
    def pictures(self) -> list[str]:
        """SVGs: steps, ranks' speeds, where the work is."""
        svgs = [pictures.of_steps(self.statuses)]
        if any(status.ranks for status in self.statuses):
            svgs.append(pictures.of_ranks(self.statuses, "speed", "Speed of each rank, of the fastest", "speed"))
            if self.last.kind != "nothing":
                svgs.append(pictures.of_shares(self.statuses))
        return svgs


def page_of(runs: Sequence[Run]) -> str:
    """Return the HTML page of these runs."""
    jinja2 = need("jinja2", "report")
    strict = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(autoescape=True, **strict)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return str(template.render(runs=runs, headings=HEADINGS, duration=duration_text))
