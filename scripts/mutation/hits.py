"""A plugin of pytest that writes down which statements with a fault each test executes (scripts/mutation)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_written: set[tuple[str, int]] = set()
_test = ""


def hit(number: int) -> None:
    """The statement of the fault ``number`` is about to run, in this process or a rank that was forked from it."""
    test = _test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (test, number) not in _written:
        _written.add((test, number))
        _write("hit", number, test)


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _test
    _test = item.nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" in os.environ:
        _write("seconds", report.duration, report.nodeid)


def _write(kind: str, value: float, test: str) -> None:
    with (Path(os.environ["MUTATION_HITS"]) / str(os.getpid())).open("a") as file:
        file.write(f"{kind}\t{value}\t{test}\n")
