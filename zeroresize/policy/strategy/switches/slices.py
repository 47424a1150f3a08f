"""The largest pieces of tensors that no cut of two layouts divides, and which ranks hold them before and after.

``P`` tensors, ``R`` ranks, ``S`` slices, ``C`` patterns: many slices are held and wanted by the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, Layout, TensorSpec

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Slices:
    """Hold slices in ascending order of tensors and units; without slices that no rank wants, or of no bytes.

    Attributes:
        tensors, begins, ends, num_bytes: [S], int64: slice s is the units of ``tensors[s]`` from ``begins[s]`` up to
            ``ends[s]``.
        patterns: [S], int64: slice s is held by the ranks ``held[patterns[s]]``, and so on.
        held, wanted: [C, R]: which ranks hold it in the layout before, and in the one after.
    """

    tensors: Indices
    begins: Indices
    ends: Indices
    num_bytes: Indices
    patterns: Indices
    held: Flags
    wanted: Flags

    def __len__(self) -> int:
        return len(self.tensors)

    def divided(self, most_bytes: int) -> Slices:
        """Cut slices that several ranks hold between units, so that none of them is larger where units allow."""
        is_shared = self.held.sum(axis=1)[self.patterns] > 1
        units = self.ends - self.begins
        parts = np.where(is_shared, np.minimum(units, -(-self.num_bytes // max(most_bytes, 1))), 1)
        if not (parts > 1).any():
            return self
        of_slice = np.repeat(np.arange(len(self)), parts)
        number = np.arange(len(of_slice)) - np.repeat(np.cumsum(parts) - parts, parts)
        begins, units, unit_bytes = self.begins[of_slice], units[of_slice], (self.num_bytes // units)[of_slice]
        starts, stops = (begins + units * one // parts[of_slice] for one in (number, number + 1))
        pieces = (self.tensors[of_slice], starts, stops, (stops - starts) * unit_bytes, self.patterns[of_slice])
        return Slices(*pieces, self.held, self.wanted)


def common_slices(before: Layout, after: Layout, tensors: Sequence[TensorSpec]) -> Slices:
    """Return the slices between neighbouring cuts of both layouts.

    Raises:
        ValueError: if the layouts are of other tensors or ranks, or if a slice is wanted that no rank holds.
    """
    if before.begins.shape != after.begins.shape or before.num_tensors != len(tensors):
        raise ValueError(
            f"layouts of {before.num_tensors} tensors on {before.num_ranks} ranks and of {after.num_tensors} on "
            f"{after.num_ranks} do not belong together, or not to {len(tensors)} tensors"
        )
    cuts_P4R = np.concatenate([before.begins, before.ends, after.begins, after.ends], axis=1)
    alike: dict[bytes, list[int]] = {}  # tensors that both layouts cut in the same way
    for number, row in enumerate(cuts_P4R):
        alike.setdefault(row.tobytes(), []).append(number)
    patterns: dict[bytes, int] = {}
    held, wanted = [], []
    tables: list[tuple[Indices, ...]] = []
    for numbers in alike.values():
        cuts_4R = cuts_P4R[numbers[0]].reshape(4, -1)
        cuts = np.unique(cuts_4R)
        held_KR, wanted_KR = (
            (begins <= cuts[:-1, None]) & (cuts[:-1, None] < ends) for begins, ends in (cuts_4R[:2], cuts_4R[2:])
        )
        is_wanted = wanted_KR.any(axis=1)
        if not held_KR[is_wanted].any(axis=1).all():
            raise ValueError(f"no rank holds all units of {tensors[numbers[0]].name} that the new layout needs")
        pattern_numbers = []
        for kept in np.flatnonzero(is_wanted):
            key = held_KR[kept].tobytes() + wanted_KR[kept].tobytes()
            if key not in patterns:
                patterns[key] = len(patterns)
                held.append(held_KR[kept])
                wanted.append(wanted_KR[kept])
            pattern_numbers.append(patterns[key])
        columns = (cuts[:-1][is_wanted], cuts[1:][is_wanted], np.array(pattern_numbers, dtype=np.int64))
        tensor_of_slice = np.repeat(np.array(numbers), len(pattern_numbers))
        tables.append((tensor_of_slice, *(np.tile(column, len(numbers)) for column in columns)))
    none = np.zeros(0, dtype=np.int64)
    of_tensor, begins, ends, numbers_S = (np.concatenate(parts) for parts in zip((none,) * 4, *tables, strict=True))
    unit_bytes = np.array([one.unit_bytes for one in tensors], dtype=np.int64)
    sizes = (ends - begins) * unit_bytes[of_tensor]
    order = np.lexsort((begins, of_tensor))
    order = order[sizes[order] > 0]
    table = (np.array(rows, dtype=bool).reshape(-1, before.num_ranks) for rows in (held, wanted))
    return Slices(of_tensor[order], begins[order], ends[order], sizes[order], numbers_S[order], *table)
