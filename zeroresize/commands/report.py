"""Tell of one or more runs in one HTML file: did balancing pay, who was slow and when, where the work was, and why.

RUN is what `zeroresize live` reads: a file that a job wrote by on_status=zr.JsonLinesTelemetry(path), or a folder of
such files. Several runs are compared, also by the accuracies and losses that a summary.json beside such a file has. The
page needs no server and no network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroresize.commands import pictures
from zeroresize.commands.errors import write
from zeroresize.commands.statuses import changes_of, of_all_ranks, starts_of, statuses_of
from zeroresize.commands.tables import console, table_of
from zeroresize.status import HEADINGS, RankStatus, Status
from zeroresize.utils.extras import need
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import CAUSES, duration_text, percent_text

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a file, or a folder of files, of lines of JSON")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(options: argparse.Namespace) -> int:
    with Progress("reading runs and drawing pictures"):
        runs = runs_of(options.run)
        page = page_of(runs)
    write("--out", options.out, page)
    if len(runs) > 1:
        headings, *rows = compared(runs)
        console().print(table_of(headings, rows, numbers=headings[1:]))
    for each in runs:
        print(f"{each.name}: {each.verdict}")
    print(f"written to {options.out}")
    return 0


def runs_of(paths: Sequence[str]) -> list[Run]:
    """Return the runs of these files and folders, each named by its file, or by its folder if that is status.jsonl."""
    of_file = {path.absolute(): statuses for path, statuses in statuses_of(paths).items()}
    names = [path.parent if path.name == "status.jsonl" else path for path in of_file]
    common = os.path.commonpath(path.parent for path in names)
    return [
        Run(os.path.relpath(name, common), statuses, scores_of(path))
        for name, (path, statuses) in zip(names, of_file.items(), strict=True)
    ]


def scores_of(path: Path) -> dict[str, float]:
    """Return accuracies and losses by name, as ``summary.json`` beside a file has them, where it is there."""
    try:
        summary = json.loads(path.with_name("summary.json").read_text(encoding="utf-8"))
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: value for name, value in numbers.items() if name.endswith(("accuracy", "loss"))}


class Run:
    """What one file of statuses tells."""

    def __init__(self, name: str, statuses: Sequence[Status], scores: Mapping[str, float]) -> None:
        self.name, self.last, self.scores, self._starts = name, statuses[-1], scores, starts_of(statuses)
        #: Without steps that a later start has done again.
        self.statuses = [
            status
            for place, start in enumerate(self._starts)
            for status in start
            if all(status.step < later[0].step for later in self._starts[place + 1 :])
        ]
        self.steps_s = sorted(each.step_s for each in self.statuses if not math.isnan(each.step_s)) or [math.nan]
        self.middle_s = statistics.median(self.steps_s)
        self.spent_s = math.fsum(start[-1].time - start[0].time for start in self._starts)
        self.saved_s, self.cost_s = self._total("saved_s"), self._total("cost_s")
        shares = [[rank.share for rank in status.ranks] for status in of_all_ranks(self.statuses)]
        #: On average over the run, of an even share: what the rank computed that was relieved most, and nobody did.
        self.least_share = min(map(statistics.fmean, zip(*shares, strict=True)), default=math.nan)
        self.dropped = max(1.0 - statistics.fmean(map(statistics.fmean, shares)), 0.0) if shares else math.nan

    def _total(self, name: str) -> float:
        """Seconds of all starts; of some kinds they go on from a checkpoint, of others from 0."""
        total_s = before_s = 0.0
        for start in self._starts:
            first_s, last_s = (getattr(start[at], name) for at in (0, -1))
            total_s += last_s - (before_s if 0.0 < before_s <= first_s else 0.0)
            before_s = last_s
        return total_s

    @property
    def verdict(self) -> str:
        """Whether balancing paid, in one sentence."""
        kind, spent, saved = self.last.kind, duration_text(self.spent_s), duration_text(self.saved_s)
        if kind == "nothing":
            cost = f"slow ranks cost {duration_text(self.cost_s)}" if self.cost_s > 0.0 else "no rank was slow for long"
            return f"{cost} of {spent}; nothing was balanced"
        if math.isnan(self.saved_s):
            return f"{kind} were balanced; what that saved this kind does not tell"
        if self.saved_s <= 0.0:
            return f"balancing saved nothing yet ({saved} of {spent})"
        if self.spent_s <= 0.0:
            return f"balancing saved {saved}"
        evenly_s = self.spent_s + self.saved_s
        more = percent_text(self.saved_s / self.spent_s)
        return f"balancing saved {saved}: {spent} would have been {duration_text(evenly_s)}, {more} more"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Numbers of the whole run, by name."""
        steps_s = self.steps_s[0], self.middle_s, self.steps_s[-1]
        end = "has ended" if self.last.state == "ended" else f"last heard of at step {self.last.step}"
        return [
            ("steps", f"{self.last.step}, {end}"),
            ("time", duration_text(self.spent_s)),
            ("ranks", str(len(self.last.ranks))),
            ("a step: shortest, middle, longest", ", ".join(map(duration_text, steps_s))),
            ("saved", duration_text(self.saved_s)),
            ("cost of slow ranks", duration_text(self.cost_s)),
            *((name, score_text(name, score)) for name, score in self.scores.items()),
        ]

    @property
    def slow(self) -> list[tuple[str, ...]]:
        """Texts of each time that a rank was slow: which, from and to which step, how slow, why, at what cost."""
        seen: dict[tuple[int, int, int], list[tuple[int, RankStatus]]] = {}
        for place, start in enumerate(self._starts):
            for status in start:
                for each in status.ranks:
                    if each.slow_since is not None:
                        seen.setdefault((place, each.slow_since, each.rank), []).append((status.step, each))
        rows: list[tuple[str, ...]] = []
        for (_, since, rank), times in sorted(seen.items()):
            slowness = statistics.median(1.0 / each.speed for _, each in times)
            to_step, last = times[-1]
            cause = statistics.mode(each.cause for _, each in times)  # as it recovers little is left of it
            texts = CAUSES.get(cause, cause), duration_text(last.cost_s)
            rows.append((str(rank), str(since), str(to_step), f"{slowness:.2f}", *texts))
        return rows

    @property
    def decisions(self) -> list[tuple[int, str]]:
        """What was decided after which step, each time that work was divided otherwise."""
        return [(now.step, now.decided) for start in self._starts for _, now in changes_of(start)]

    @property
    def pictures(self) -> list[str]:
        """SVGs: steps, ranks' speeds, where the work is."""
        return pictures.of_run(self.statuses)


def compared(runs: Sequence[Run]) -> list[list[str]]:
    """Return headings, and of each run how long its steps were, what was computed elsewhere, and its scores."""
    scores = sorted({name for run in runs for name in run.scores})
    steps_s = [run.middle_s for run in runs if not math.isnan(run.middle_s)] or [math.nan]
    names = [name.replace("_", " ") for name in scores]
    rows = [["run", "steps", "a step", "× best", "speed-up", "least share", "dropped", "saved", *names]]
    for run in runs:
        ratios = run.middle_s / min(steps_s), max(steps_s) / run.middle_s
        numbers = ("?" if math.isnan(each) else f"{each:.2f}" for each in (*ratios, run.least_share, run.dropped))
        scored = (score_text(name, run.scores[name]) if name in run.scores else "" for name in scores)
        saved = duration_text(run.saved_s)
        rows.append([run.name, str(run.last.step), duration_text(run.middle_s), *numbers, saved, *scored])
    return rows


def score_text(name: str, score: float) -> str:
    """Return an accuracy in per cent, a loss as it is."""
    return f"{100 * score:.1f} %" if name.endswith("accuracy") else f"{score:.4g}"


def page_of(runs: Sequence[Run]) -> str:
    """Return the HTML page of these runs."""
    jinja2 = need("jinja2", "report")
    strict = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = jinja2.Environment(autoescape=True, **strict).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    table = compared(runs) if len(runs) > 1 else []
    svg = pictures.of_runs({run.name: run.statuses for run in runs}) if table else ""
    return str(template.render(runs=runs, table=table, svg=svg, headings=HEADINGS))
