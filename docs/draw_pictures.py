"""Draws the pictures of docs/pictures from a real run: python docs/draw_pictures.py [--measure] [--seconds 30]

``--measure`` trains the model of ``zeroresize demo`` twice, without balancing and with it, while rank
1's products take four times as long for a while; run.csv has what steps took, run.jsonl what the balancer told. From
these run.png is drawn, and report.png and live.png, what a browser (chromium) and a terminal show of run.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console

from zeroresize.commands import live, report
from zeroresize.commands.demo_training import train
from zeroresize.commands.ranks import StartedRanks

FOLDER = Path(__file__).resolve().parent / "pictures"
CSV, STATUSES = FOLDER / "run.csv", FOLDER / "run.jsonl"
CHI = 4.0
#: Shares of the run, and whether rank 1 is slow.
PHASES = ((0.25, False), (0.5, True), (0.25, False))
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")


def measure(name: str, is_balanced: bool, path: Path, seconds: float) -> list[tuple[str, float, float, int]]:
    """Train, and return of each update: the run's name, when it was, the milliseconds of a step, whether it is slow."""
    phases = [(share, {1: CHI} if is_slow else {}, is_balanced) for share, is_slow in PHASES]
    rows, passed_s = [], 0.0
    # of three times as long since long ago a third is left: that is what training takes
    with StartedRanks(train, 2, phases, 0.0, 3 * seconds, str(path)) as ranks:
        while not ranks.have_ended:
            for number, step_s in ranks.received(1.0):
                passed_s += 5 * step_s
                rows.append((name, round(passed_s, 2), round(1e3 * step_s, 1), int(PHASES[number][1])))
    return rows


def draw() -> None:
    with CSV.open(newline="", encoding="utf-8") as file:
        rows = [
            (row["run"], float(row["s"]), float(row["step_ms"]), row["is_slow"] == "1") for row in csv.DictReader(file)
        ]
    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    slow = [s for name, s, _, is_slow in rows if is_slow and name == "on"]
    axes.axvspan(min(slow), max(slow), color="0.92", lw=0)
    most_ms = statistics.quantiles([ms for *_, ms, _ in rows], n=50)[-1]
    axes.text(min(slow), 1.12 * most_ms, f" rank 1 of 2 is {CHI:g} times slower", va="top", color="0.3")
    for name, label, style in (
        ("off", "no balancing", {"color": "0.55", "ls": "--"}),
        ("on", "zeroresize, mode exact", {"color": "k"}),
    ):
        axes.plot(*zip(*[(s, ms) for run, s, ms, _ in rows if run == name], strict=True), label=label, lw=1.6, **style)
    axes.set(xlabel="seconds of training", ylabel="a step, ms", ylim=(0, 1.15 * most_ms), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(FOLDER / "run.png", dpi=110, pil_kwargs={"optimize": True})


def screenshot(page: Path, out: Path, width: int, height: int) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{out} stays as it was: no chromium is there")
        return
    with tempfile.TemporaryDirectory() as profile:
        places = f"--user-data-dir={profile}", f"--screenshot={out}", f"--window-size={width},{height}"
        subprocess.run([browser, *BROWSER, *places, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="make run.csv and run.jsonl anew")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each training takes (default 30)")
    options = parser.parse_args()
    if options.measure:
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / f"{name}.jsonl" for name in ("off", "on")}
            rows = [row for name, path in paths.items() for row in measure(name, name == "on", path, options.seconds)]
            STATUSES.write_bytes(paths["on"].read_bytes())
        with CSV.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("run", "s", "step_ms", "is_slow"), *rows])
    draw()
    os.chdir(FOLDER)  # so that pictures name no folder
    lines = STATUSES.read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "page.html"
        page.write_text(report.page_of(report.runs_of([STATUSES.name])), encoding="utf-8")
        screenshot(page, FOLDER / "report.png", 860, 1560)
        cut = FOLDER / "status.jsonl"
        cut.write_text("".join(lines[: 3 * len(lines) // 5]), encoding="utf-8")  # while rank 1 is slow
        group = live.Group(Path(cut.name))
        group.look()
        cut.unlink()
        group.newest = dataclasses.replace(group.newest, time=time.time() - 2.0)
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(live.shown([group], console.width))
        page.write_text(console.export_html(inline_styles=True), encoding="utf-8")
        screenshot(page, FOLDER / "live.png", 1000, 220)


if __name__ == "__main__":
    main()
