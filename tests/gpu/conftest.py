"""Every test of this folder needs a GPU, and starts ranks on one or more."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import processes
from helpers.devices import join_by_nccl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")


@pytest.fixture
def run_on_gpus(tmp_path: Path) -> Callable[..., list[Any]]:
    """``run_on_gpus(fn, num_ranks, *args)`` returns ``fn(rank, group, *args)`` of every rank; ``fn`` is a module's."""

    def run(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 100.0) -> list[Any]:
        __tracebackhide__ = True
        scratch = Path(tempfile.mkdtemp(prefix="ranks_", dir=tmp_path))
        options = {"start_method": "spawn", "join": join_by_nccl}
        return processes.run_ranks(fn, num_ranks, *args, timeout_s=timeout_s, scratch=scratch, **options)

    return run
