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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from zeroresize.pipeline.records import ProfileRecord
from zeroresize.plan.partition import Partition
from zeroresize.utils.json_lines import read_json_lines

FILE = "pipeline.jsonl"
HEADINGS = ("step", "imbalance", "bubbles", "simulated", "moved")
_NUMBERS = ("step_s", "imbalance", "bubble_ratio", "simulated_bubble_ratio")


@dataclass(frozen=True)
class Period:
    """Steps in which no layer moved.

    Attributes:
        begin: after so many steps it began.
        boundaries: [S + 1] in force.
        profiles: in it; not empty.
        move: that ended it; None for the last one.
    """

    begin: int
    boundaries: tuple[int, ...]
    profiles: Sequence[ProfileRecord]
    move: Mapping[str, Any] | None

    def usual(self, name: str) -> float:
        """The median of its profiles' numbers."""
        return median(getattr(one, name) for one in self.profiles)


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
    begin, num_layers = 0, None
    for number, line in enumerate(read_json_lines(path), 1):
        try:
            if line["kind"] == "profile":
                profile = ProfileRecord.from_dict(line)
                num_layers = num_layers or len(profile.layers)
                Partition.of(profile.boundaries, num_layers, len(profile.boundaries) - 1)
                if profiles and profile.boundaries != profiles[-1].boundaries:  # a run that was resumed
                    periods.append(Period(begin, profiles[-1].boundaries, tuple(profiles), None))
                    begin, profiles = profiles[-1].step, []
                profiles.append(profile)
            elif line["kind"] == "move":
                move = {key: line[key] for key in ("step", "moved_bytes", "seconds")}
                periods.append(Period(begin, profiles[-1].boundaries, tuple(profiles), move))
                begin, profiles = int(move["step"]), []
            else:
                raise ValueError(f"kind={line['kind']!r}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a profile, or the move after one, as a pipeline's balancer tells "
                f"them: {type(error).__name__}: {error}"
            ) from error
    if profiles:
        periods.append(Period(begin, profiles[-1].boundaries, tuple(profiles), None))
    if not periods:
        raise ValueError(f"{path}: there is no profile in it yet")
    return periods


def table_of(periods: Sequence[Period]) -> str:
    """Markdown."""
    most = max(len(period.boundaries) - 1 for period in periods)
    rows = [
        ["from step", *(f"stage {stage}" for stage in range(most)), *HEADINGS],
        ["---:"] * (1 + most + len(HEADINGS)),
    ]
    for period in periods:
        layers = [_named(begin, end) for begin, end in itertools.pairwise(period.boundaries)]
        moved = (
            "" if period.move is None else f"{period.move['moved_bytes'] / 1e6:.1f} MB, {period.move['seconds']:.2f} s"
        )
        step_s, imbalance, bubbles, simulated = map(period.usual, _NUMBERS)
        rows.append(
            [
                str(period.begin),
                *layers,
                *[""] * (most - len(layers)),
                f"{1e3 * step_s:.0f} ms",
                f"{imbalance:.2f}",
                f"{100 * bubbles:.0f} %",
                f"{100 * simulated:.0f} %",
                moved,
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _named(begin: int, end: int) -> str:
    """Such as "3 to 7 (5)"."""
    return f"{begin} (1)" if end - begin == 1 else f"{begin} to {end - 1} ({end - begin})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help=f"the records, or the folder of {FILE}")
    options = parser.parse_args(arguments)
    path = options.path / FILE if options.path.is_dir() else options.path
    try:
        print(table_of(read_periods(path)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
