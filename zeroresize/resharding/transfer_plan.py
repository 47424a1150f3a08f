"""What must travel between two maps of owners, and from where, is a pure function of plain numbers."""

from __future__ import annotations

import numpy as np

from zeroresize.plan.ownership import Indices, OwnershipMap


def transfer_plan(before: OwnershipMap, after: OwnershipMap) -> dict[tuple[int, int], Indices]:
    """Return which units travel, by (source, destination): those that change owners and no others.

    Every unit has one owner, so its source is no choice, and no plan sends less.

    Returns:
        Ascending units for every pair of ranks that has any, in ascending order of the pairs.

    Raises:
        ValueError: if the maps are of different units or ranks.
    """
    if len(before.owners) != len(after.owners) or before.num_ranks != after.num_ranks:
        raise ValueError(
            f"a map of {len(before.owners)} units on {before.num_ranks} ranks cannot follow one of "
            f"{len(after.owners)} units on {after.num_ranks} ranks"
        )
    moved = np.flatnonzero(before.owners != after.owners)
    if not moved.size:
        return {}
    pairs = before.owners[moved] * before.num_ranks + after.owners[moved]
    order = np.argsort(pairs, kind="stable")
    pairs, moved = pairs[order], moved[order]
    begins = np.flatnonzero(np.diff(pairs, prepend=-1))
    return {
        (int(pairs[begin]) // before.num_ranks, int(pairs[begin]) % before.num_ranks): units
        for begin, units in zip(begins, np.split(moved, begins[1:]), strict=True)
    }
