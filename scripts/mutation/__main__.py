"""Plant faults in the package, one at a time, and see whether a test fails.

    python -m scripts.mutation list --number 200 --out faults.csv
    python -m scripts.mutation run --faults faults.csv --out results.csv

A fault changes one operator, comparison, constant or condition, swaps two arguments, or removes a statement. Which
faults are planted depends on the seed and the package alone. ``run`` works on a copy of the tree: it runs all tests
once, to learn which of them execute the statement of which fault, in ranks, too; then, for each fault, these tests,
fastest first, until one fails or hangs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.mutation.faults import FIELDS, chosen_faults, planted
from zeroresize.utils.progress import Progress

MARKERS = "not slow and not exhaustive and not hosts and not gpu"
BATCH = 20  # tests that one process runs
LIMIT_S = 30.0  # for each of them, in the mean: a batch that takes longer has found the fault


def instrumented(path: Path, numbers: dict[int, list[int]]) -> str:
    """The source of a file that says, before each statement that spans a fault's line, which faults these are."""
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [part for statement in block for part in (*_hits(statement, numbers), statement)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _hits(statement: ast.stmt, numbers: dict[int, list[int]]) -> Iterator[ast.stmt]:
    inner = [child.lineno for child in ast.walk(statement) if isinstance(child, ast.stmt) and child is not statement]
    last = min([line - 1 for line in inner], default=statement.end_lineno or 0)
    for line in range(statement.lineno, max(last, statement.lineno) + 1):
        for number in numbers.get(line, []):
            yield ast.parse(f"__import__('scripts.mutation.hits').mutation.hits.hit({number})").body[0]


def tests_by_fault(tree: Path, faults: list[dict[str, str]], options: argparse.Namespace) -> list[list[str]]:
    """For each fault the tests that execute its statement, the fastest first: all tests run once for it."""
    numbers: dict[str, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for number, fault in enumerate(faults):
        numbers[fault["file"]][int(fault["line"])].append(number)
    sources = {file: (tree / file).read_text() for file in numbers}
    for file in numbers:
        (tree / file).write_text(instrumented(Path(file), numbers[file]))
    folder = tree.parent / "hits"
    folder.mkdir()
    plugin = ["-p", "scripts.mutation.hits", "-n", str(options.workers), "-m", options.markers, *options.tests]
    _pytest(tree, plugin, None, {"MUTATION_HITS": str(folder)})
    for file, source in sources.items():
        (tree / file).write_text(source)
    seconds: dict[str, float] = {}
    reached: dict[int, set[str]] = collections.defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            kind, value, test = line.split("\t")
            if kind == "seconds":
                seconds[test] = float(value)
            else:
                reached[int(value)].add(test)
    return [sorted(reached[number] & seconds.keys(), key=lambda test: seconds[test]) for number in range(len(faults))]


def first_failing(tree: Path, fault: dict[str, str], tests: list[str]) -> str:
    """The first of the tests that fails or hangs with the fault planted, or nothing."""
    path = tree / fault["file"]
    whole = path.read_text()
    path.write_text(planted(fault))
    try:
        for at in range(0, len(tests), BATCH):  # importing torch takes longer than most tests
            output = _pytest(tree, ["-x", "-n", "0", *tests[at : at + BATCH]], BATCH * LIMIT_S, {})
            failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
            if failed or (" passed" not in output and " skipped" not in output):
                return failed[1] if failed else tests[at]
        return ""
    finally:
        path.write_text(whole)


def _pytest(tree: Path, options: list[str], limit_s: float | None, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    whole = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=tree, env=whole | environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:  # also workers and ranks of a run that hangs, or that Ctrl-C ends
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "run"))
    parser.add_argument("--faults", type=Path, help="what list has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--roots", nargs="+", default=["zeroresize"], help="folders of the package")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--markers", default=MARKERS)
    parser.add_argument("--workers", type=int, default=3, help="of the run that learns what tests execute")
    options = parser.parse_args()
    if options.command == "list":
        _write(options.out, FIELDS, chosen_faults(options.roots, options.number, options.seed))
        return
    with options.faults.open() as file:
        faults = list(csv.DictReader(file))
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(".", tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build"))
        rows = []
        with Progress("learning which tests execute which fault"):
            all_tests = tests_by_fault(tree, faults, options)
        with Progress("faults", len(faults)) as progress:
            for fault, tests in zip(faults, all_tests, strict=True):
                rows.append({**fault, "tests": len(tests), "failed": first_failing(tree, fault, tests)})
                place = f"{fault['file']}:{fault['line']} {fault['fault']}: {fault['text']}"
                print(place, "->", rows[-1]["failed"] or f"SURVIVES {len(tests)} tests", flush=True)
                _write(options.out, (*FIELDS, "tests", "failed"), rows)
                progress.advance()
    print(f"{sum(bool(row['failed']) for row in rows)} of {len(rows)} faults are found")


def _write(path: Path, fields: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
