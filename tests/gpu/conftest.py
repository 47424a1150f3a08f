"""Ranks on GPUs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import processes

from scripts.bench.common import join_ranks


@pytest.fixture
def run_on_gpus(tmp_path: Path) -> Callable[..., list[Any]]:
    """``run_on_gpus(fn, num_ranks, *args)`` returns ``fn(rank, group, *args)`` of every rank; ``fn`` is a module's."""
    return processes.runner_in(tmp_path, 100.0, start_method="spawn", join=join_ranks)
