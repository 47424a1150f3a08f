"""What a study's table says it has finished."""

from __future__ import annotations

import csv
from pathlib import Path


def written(table: Path) -> list[tuple[str, str]]:
    """(cell, seed) of each row."""
    with table.open(newline="") as stream:
        return [(row["cell"], row["seed"]) for row in csv.DictReader(stream)]
