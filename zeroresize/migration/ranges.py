"""Which columns of a migrated slice each receiver computes (paper, section IV-A), for parts of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

#: Every part but the last is a multiple of so many columns, where the slice is long enough.
_UNIT = 8
_FEWEST_UNITS = 20


def bounds_of_parts(num_columns: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Where the parts of a slice begin and end: part i is columns ``bounds[i]`` to ``bounds[i + 1]`` of it.

    Args:
        num_columns: of the migrated slice, L_mig.
        parts: how much of it each receiver computes; shares that sum to 1. With equal ones this is the paper's
            m = L_mig / (e − x), but nothing needs to divide evenly.
    """
    unit = _UNIT if num_columns >= _UNIT * _FEWEST_UNITS * len(parts) else 1
    ends = [min(unit * round(num_columns * end / unit), num_columns) for end in itertools.accumulate(parts)]
    return (0, *ends[:-1], num_columns)
