"""Tell who straggled in a job, who waited, what each mode would have saved of its steps, and whether it will pay.

TRACE is a trace that torch.profiler wrote by export_chrome_trace, one of each rank (.json, .json.gz), with steps
marked by profiler.step(); or a file of status (.jsonl) that a job wrote by Balancer(…, on_status=zr.JsonLinesTelemetry(
path)), zr.watch or DataBalancer; or a folder of such.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from zeroresize.commands.errors import CommandError
from zeroresize.commands.statuses import files_of, of_all_ranks, statuses_of
from zeroresize.commands.tables import console, table_of
from zeroresize.commands.traces import Job, is_trace, job_of
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.slowness.windows import StepWindow, WatchedStep, share_saved, shares_of_causes, window_of
from zeroresize.policy.speed.noise import ALIKE
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import LEAST_SECONDS, RankTimes
from zeroresize.policy.tensor.what_if import WhatIf
from zeroresize.status import Status
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import CAUSES, duration_text, named_ranks, percent_text
from zeroresize.utils.usual import usual_of_others

#: Who makes a smaller share of all steps late is no straggler, and what saves less is not worth a line of code.
_LEAST = 0.05
#: Of a rank; and so many updates with the same times: what is decided then stays.
_NUM_UNITS, _NUM_UPDATES = 1024, 30
#: By how many times as long as the others a step takes, each shade from so much on.
_SHADES = {0.0: "·", 1.1: "░", 1.25: "▒", 1.6: "▓", 2.5: "█"}
#: Of a line of the map.
_MOST_CELLS = 110
BY_SPEED = "work by speed"


class Straggler(NamedTuple):
    """A rank that took so many times as long as the others in steps of these numbers, late by so much in all."""

    rank: int
    times: float
    numbers: list[int]
    cause: str
    late_s: float


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="+", metavar="TRACE", help="a trace, a file of status, or a folder of them")


def run(options: argparse.Namespace) -> int:
    with Progress("reading traces"):
        jobs = jobs_of(options.trace)
    for job in jobs:
        show(job, console())
    return 0


def jobs_of(names: Sequence[str]) -> list[Job]:
    """Return what these files and folders tell: traces are those of one job, each file of status is a group's.

    Raises:
        CommandError: naming a file that is neither, or is not there.
    """
    files = [str(file) for file in files_of(names, (".json", ".json.gz", ".jsonl"))]
    statuses = [file for file in files if file.endswith(".jsonl")]
    traces = [Path(file) for file in files if file not in statuses and (file in names or is_trace(Path(file)))]
    jobs = [job_of(traces)] if traces else []
    with suppress(CommandError) if jobs else nullcontext():  # beside traces a folder has other lines of JSON
        jobs += [_job_of_statuses(*of_file) for of_file in statuses_of(statuses).items()] if statuses else []
    if not jobs:
        raise CommandError(f"{', '.join(names)}: no trace of torch.profiler is there: export_chrome_trace writes one")
    return jobs


def _job_of_statuses(path: Path, statuses: Sequence[Status]) -> Job:
    statuses = [each for each in of_all_ranks(statuses) if not any(math.isnan(rank.busy_s) for rank in each.ranks)]
    if not statuses:
        raise CommandError(f"{path}: no rank's times are in its newest status, or not yet; let the job take more steps")
    newest = statuses[-1]
    steps: list[list[WatchedStep]] = [[] for _ in newest.ranks]
    causes: dict[int, list[str]] = {}
    for status in statuses:
        longest_s = max(each.busy_s for each in status.ranks)
        step_s = longest_s if math.isnan(status.step_s) else status.step_s  # some kinds do not tell it
        for of_rank, each in zip(steps, status.ranks, strict=True):
            of_rank.append(WatchedStep(each.busy_s, max(step_s - each.busy_s, 0.0)))
            if each.cause:
                causes.setdefault(each.rank, []).append(each.cause)
    notes = ["a status tells neither collectives nor products: each step below is a status, at even shares of work"]
    kind = "" if newest.kind == "nothing" else newest.kind
    saved_s = newest.saved_s if kind else 0.0
    ranks, usual = [each.rank for each in newest.ranks], {rank: statistics.mode(each) for rank, each in causes.items()}
    return Job(str(path), ranks, [status.step for status in statuses], steps, notes, kind, None, usual, saved_s)


def slowness_of(job: Job) -> list[list[float]]:
    """Return [R][S] how many times as long as is usual among the others, of which there are, a rank took for a step."""
    busy_s = [[max(step.busy_s, LEAST_SECONDS) for step in of_ranks] for of_ranks in zip(*job.steps, strict=True)]
    times = ([a / b for a, b in zip(each, usual_of_others(each), strict=True)] for each in busy_s)
    return [list(of_rank) for of_rank in zip(*times, strict=True)]


def stragglers_of(job: Job) -> list[Straggler]:
    """Return the ranks that were slow, the latest first."""
    total_s = math.fsum(max(step.busy_s + step.wait_s for step in ranks) for ranks in zip(*job.steps, strict=True))
    stragglers = []
    for row, times in enumerate(slowness_of(job)):
        slow = [place for place, each in enumerate(times) if each >= 1.0 + ALIKE]
        late_s = math.fsum(job.steps[row][place].busy_s * (1.0 - 1.0 / times[place]) for place in slow)
        if late_s > _LEAST * total_s:
            windows = [window_of([steps[place] for place in slow], len(slow)) for steps in job.steps]
            cause = next(iter(shares_of_causes(windows.pop(row), windows)), "compute")
            cause = job.causes.get(job.ranks[row], cause)
            usual_times = statistics.median(times[place] for place in slow)
            numbers = [job.numbers[place] for place in slow]
            stragglers.append(Straggler(job.ranks[row], usual_times, numbers, cause, late_s))
    return sorted(stragglers, key=lambda each: each.late_s, reverse=True)


def savings_of(job: Job) -> dict[str, float]:
    """Return which share of a step would have been saved at most, by what is divided, or by the mode."""
    windows = [window_of(steps, len(steps)) for steps in job.steps]
    if not all(window.is_sound for window in windows):
        return {}
    has_products = not any(math.isnan(window.products_s) for window in windows)
    return {BY_SPEED: share_saved(windows)} | (_savings_of_modes(windows) if has_products and not job.kind else {})


def _savings_of_modes(windows: Sequence[StepWindow]) -> dict[str, float]:
    """What each mode's policy decides if all steps are like these, units are fine, and sending costs nothing."""
    config, num_ranks = BalanceConfig(mode="off"), len(windows)
    what_if = WhatIf(config, num_ranks, [SegmentWork(num_units=num_ranks * _NUM_UNITS, quantum=1, work=1.0)])
    for controller in what_if.controllers:
        controller.expect_moves(MoveCost(0.0, 0.0), 0.0)
    cost = ResizingCost.linear(config.max_ratio)
    times = [
        RankTimes(max(each.computing_s - each.products_s, 0.0), each.products_s, 1.0, cost).beginning_after(
            each.loader_s
        )
        for each in windows
    ]
    for _ in range(_NUM_UPDATES):
        what_if.update(times, CollectiveTimes(0.0, (0.0,) * num_ranks, MigrationCost()))
    now_s = max(each.busy_s for each in times)
    step_s = max(now_s, *(window.step_s for window in windows))
    return {mode: max(now_s - plan.predicted_step_s, 0.0) / step_s for mode, plan in what_if.plans.items()}


def advice(job: Job, stragglers: Sequence[Straggler], savings: dict[str, float]) -> str:
    """Return in one sentence whether balancing will pay."""
    if len(job.ranks) < 2 or job.waits == {}:
        return "Whether it will pay cannot be said: give traces of all ranks, with their collectives."
    if job.saved_s > 0.0:
        return f"It pays already: dividing {job.kind} otherwise has saved {duration_text(job.saved_s)} so far."
    if not stragglers:
        return "It will not pay as long as no rank is slower than the others."
    late, most = stragglers[0], percent_text(savings.get(BY_SPEED, 0.0))
    said = f"rank {late.rank} is late by {CAUSES.get(late.cause, late.cause)}"
    if late.cause == "loader":
        return f"Mend what comes before the forward first: {said}; dividing work saves {most} of a step at most."
    if savings.get(BY_SPEED, 0.0) < _LEAST:
        return f"It will not pay: {said}, and dividing work saves {most} of a step at most."
    ways = {"samples": "with DataBalancer", "": "with DataBalancer where ranks are data parallel"}
    way = ways.get(job.kind, f"if {job.kind} are divided by speed")
    if "exact" in savings:
        way += f", {percent_text(savings['exact'])} with Balancer in mode exact where they are tensor parallel"
    return f"It will pay while this lasts: {said}, and steps get shorter by up to {most} {way}."


def show(job: Job, screen: Any) -> None:
    """Print what is known of a job; shades are characters, in no colour."""
    numbers, can_compare = job.numbers, len(job.ranks) > 1
    stragglers, savings = (stragglers_of(job), savings_of(job)) if can_compare else ([], {})
    title = f"{named_ranks(job.ranks)}; steps {numbers[0]} to {numbers[-1]}; {job.name}"
    screen.print(title, style="bold", soft_wrap=True)
    for note in job.notes:
        screen.print(f"note: {note}", style="dim", soft_wrap=True)
    if stragglers:
        headings = ("straggler", "times as long", "because of", "in steps", "late by, each")
        rows = [
            (
                f"rank {rank}",
                f"{times:.2f}",
                CAUSES.get(cause, cause),
                f"{len(slow)} of {len(numbers)}, {slow[0]} to {slow[-1]}",
                duration_text(late_s / len(slow)),
            )
            for rank, times, slow, cause, late_s in stragglers
        ]
        screen.print("", table_of(headings, rows), sep="\n")
    if can_compare:
        _show_map(screen, job)
    if can_compare and job.waits:
        waits = sorted(job.waits.items(), key=lambda item: max(item[1].values()), reverse=True)
        texts_of_waits = [(*key, *(_wait_text(of_rank, which) for which in (max, min))) for key, of_rank in waits]
        screen.print("", table_of(("waits in group", "collective", "longest", "shortest"), texts_of_waits), sep="\n")
    if savings:
        shares = {name: percent_text(saved) for name, saved in savings.items()}
        texts = dict.fromkeys(shares.values())
        modes = [(", ".join(name for name in shares if shares[name] == text), text) for text in texts]
        screen.print("", table_of(("divided, or mode", "saves of a step, at most"), modes), sep="\n")
    screen.print(f"\n{advice(job, stragglers, savings)}", style="bold", soft_wrap=True)


def _show_map(screen: Any, job: Job) -> None:
    per_cell = math.ceil(len(job.numbers) / min(max(screen.width - 10, 8), _MOST_CELLS))
    legend = ", ".join(f"{shade} {least:g}" for least, shade in _SHADES.items() if least)
    screen.print(f"\ntimes as long as the others, step by step: {legend} or more")
    for rank, times in zip(job.ranks, slowness_of(job), strict=True):
        cells = (max(times[place : place + per_cell]) for place in range(0, len(times), per_cell))
        shades = "".join([shade for least, shade in _SHADES.items() if each >= least][-1] for each in cells)
        screen.print(f"{f'rank {rank}':<9} {shades}")


def _wait_text(seconds: dict[int, float], which: Any) -> str:
    rank = which(seconds, key=seconds.__getitem__)
    return f"rank {rank}: {duration_text(seconds[rank])}"
