"""Which stage of a pipeline had which layers over time: python -m scripts.report.stages runs/gpt/pipeline.jsonl

Prints a table, a row for each division of the layers that was in force: which layers each stage had, and how long and
how idle steps were then, the median of its profiles: of the records that a pipeline's balancer tells,
``PipelineBalancer(..., on_profile=telemetry, on_change=telemetry)`` with ``telemetry = JsonLinesTelemetry(path)``, on
one rank. The run may still go on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zeroresize.pipeline.records import ProfileRecord
from zeroresize.plan.partition import Partition
from zeroresize.utils.files import read_json_lines

FILE = "pipeline.jsonl"
HEADINGS = ("step", "imbalance", "bubbles", "simulated", "moved")


class Period(NamedTuple):
    """Steps in which no layer moved: after how many it began, its profiles, and the move that ended it, if any."""

    begin: int
    profiles: Sequence[ProfileRecord]
    move: Mapping[str, Any] | None


def read_periods(path: Path) -> list[Period]:
    """What a file of records tells, in the order of time.

    Raises:
        ValueError: naming the file and the line that is no such record, or if there is no profile.
        OSError: if there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: pass what JsonLinesTelemetry wrote, or a folder with {FILE}")
    periods: list[Period] = []
    profiles: list[ProfileRecord] = []
    begin = 0
    for number, line in enumerate(read_json_lines(path), 1):
        try:
            if line["kind"] == "profile":
                profile = ProfileRecord.from_dict(line)
                Partition.of(profile.boundaries, len(profile.layers), len(profile.boundaries) - 1)
                if profiles and profile.boundaries != profiles[-1].boundaries:  # a run that was resumed
                    periods.append(Period(begin, profiles, None))
                    begin, profiles = profiles[-1].step, []
                profiles.append(profile)
            elif line["is_made"]:
                move = {key: line[key] for key in ("step", "moved_bytes", "change_s")}
                if not profiles:
                    raise ValueError("a move before any profile")
                periods.append(Period(begin, profiles, move))
                begin, profiles = int(move["step"]), []
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a profile, or the move after one, as a pipeline's balancer tells "
                f"them: {type(error).__name__}: {error}"
            ) from error
    periods += [Period(begin, profiles, None)] if profiles else []
    if not periods:
        raise ValueError(f"{path}: there is no profile in it yet")
    return periods


def table_of(periods: Sequence[Period]) -> str:
    """Markdown."""
    most = max(len(period.profiles[0].boundaries) - 1 for period in periods)
    rows = [["from step", *(f"stage {stage}" for stage in range(most)), *HEADINGS], ["---:"] * (1 + most + 5)]
    for begin, profiles, move in periods:
        layers = [
            f"{first} (1)" if end - first == 1 else f"{first} to {end - 1} ({end - first})"
            for first, end in itertools.pairwise(profiles[0].boundaries)
        ]
        step_s, imbalance, bubbles, simulated = (
            median(getattr(profile, name) for profile in profiles)
            for name in ("step_s", "imbalance", "bubble_ratio", "simulated_bubble_ratio")
        )
        moved = "" if move is None else f"{move['moved_bytes'] / 1e6:.1f} MB, {move['change_s']:.2f} s"
        figures = [f"{1e3 * step_s:.0f} ms", f"{imbalance:.2f}", f"{100 * bubbles:.0f} %", f"{100 * simulated:.0f} %"]
        rows.append([str(begin), *layers, *[""] * (most - len(layers)), *figures, moved])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help=f"the records, or the folder of {FILE}")
    options = parser.parse_args(arguments)
    try:
        print(table_of(read_periods(options.path / FILE if options.path.is_dir() else options.path)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
