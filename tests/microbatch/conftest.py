"""An instruction store, and planners that start at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.planning import fork_planners
from helpers.stores import StoreKeeper

from zeroresize.microbatch.store import SharedStore


@pytest.fixture
def keeper() -> Iterator[StoreKeeper]:
    """A store, and the process that keeps it."""
    keeper = StoreKeeper()
    yield keeper
    keeper.end()


@pytest.fixture
def store(keeper: StoreKeeper) -> SharedStore:
    """A store that another process keeps."""
    return keeper.store


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners start at once, without importing everything again."""
    fork_planners(monkeypatch)
