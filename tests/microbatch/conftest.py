"""Instruction stores, each test on both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.stores import KINDS, StoreKeeper


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
