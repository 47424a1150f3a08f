"""Turns what runs wrote into pictures and one HTML page: python -m scripts.report runs/vit

Step times, and what balancing brought by the run's own steps without it; every rank's busy time and γ, who lent what to
whom, the layers' shares over time, and which columns were pruned how often: from what ``vit_examples.train`` wrote,
also while it still runs. Of a folder of runs, such as runs/demo or a study's, the page begins with a table that
compares them. The page is one file that can be mailed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from scripts.report.compare import NamedRun
from scripts.report.files import files_of_ranks
from scripts.report.page import RunSection, page_of, section_of_run
from scripts.report.run import RunFolder


def write_report(run: RunFolder, folder: Path) -> Path:
    """Write ``report.html`` of one run and its pictures as PNG files into ``folder``; returns the page's path."""
    title = f"Balancing in {run.path.resolve().name}"
    return _write(folder, title, [_section(title, run, folder)])


def write_comparison(path: Path, runs: Sequence[NamedRun], left_out: Sequence[str], folder: Path) -> Path:
    """Write ``report.html`` of several runs into ``folder``, the pictures of each in a folder of its own there.

    A run that cannot be drawn is left out.

    Raises:
        ValueError: if none can be drawn.
    """
    console = Console(stderr=True)
    drawn, sections, left_out = [], [], list(left_out)
    for named in track(runs, "drawing", console=console, disable=not console.is_terminal):
        try:
            sections.append(_section(named.name, named.run, folder / named.name))
            drawn.append(named)
        except ValueError as error:
            left_out.append(str(error))
    if not drawn:
        raise ValueError("no run there can be drawn:\n" + "\n".join(left_out))
    return _write(folder, f"Balancing in the runs of {path.resolve().name}", sections, drawn, left_out)


def runs_below(path: Path) -> tuple[list[NamedRun], list[str]]:
    """All runs in the folders below ``path``, those without balancing first; and why others are left out."""
    runs, left_out = [], []
    folders = sorted({file.parent for file in path.rglob("balance-rank*.jsonl")} - {path})
    for folder in folders:
        try:
            runs.append(NamedRun(folder.relative_to(path).as_posix(), RunFolder.read(folder)))
        except (ValueError, OSError) as error:
            left_out.append(str(error))
        except Exception as error:
            left_out.append(f"{folder}: cannot be read: {type(error).__name__}: {error}")
    return sorted(runs, key=lambda one: (not one.is_called_baseline, not one.is_reference, one.name)), left_out


def _section(title: str, run: RunFolder, folder: Path) -> RunSection:
    """All that the page says of a run.

    Raises:
        ValueError: naming the run, if it cannot be told or drawn.
        OSError: if its pictures cannot be written.
    """
    try:
        return section_of_run(title, run, folder)
    except OSError:
        raise
    except Exception as error:  # one run's numbers must not cost the page of all others
        raise ValueError(f"{run.path}: cannot be drawn: {type(error).__name__}: {error}") from error


def _write(
    folder: Path,
    title: str,
    sections: Sequence[RunSection],
    compared: Sequence[NamedRun] = (),
    left_out: Sequence[str] = (),
) -> Path:
    path = folder / "report.html"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(page_of(title, sections, compared, left_out), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output folder of a run, or one with such folders below it")
    parser.add_argument("--output", type=Path, help="where the page goes (default: report/ in that folder)")
    arguments = parser.parse_args()
    path, output = arguments.folder, arguments.output or arguments.folder / "report"
    try:
        runs, left_out = ([], []) if files_of_ranks(path, "balance", "jsonl") else runs_below(path)
        if runs:
            page = write_comparison(path, runs, left_out, output)
        elif left_out:
            sys.exit("error: no run there can be read:\n" + "\n".join(left_out))
        else:
            page = write_report(RunFolder.read(path), output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"written to {page}")


if __name__ == "__main__":
    main()
