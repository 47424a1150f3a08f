"""Instruction stores, each test on both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.planning import ReadyProcesses
from helpers.stores import KINDS, StoreKeeper

from zeroresize.microbatch import planners


@pytest.fixture(params=KINDS)
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreKeeper]:
    """A store of each kind, and the process that keeps it."""
    keeper = StoreKeeper(request.param, tmp_path)
    yield keeper
    keeper.end()


@pytest.fixture
def store(keeper: StoreKeeper):
    """A store of each kind."""
    return keeper.store


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planners start at once, without importing everything again; three times at most."""
    processes = ReadyProcesses(3)
    monkeypatch.setattr(planners, "start_process", processes.start)
    yield
    processes.end()
