"""What must travel between two layouts: who holds each slice, who wants it, and who sends it to whom.

``P`` tensors, ``R`` ranks, ``S`` slices, ``C`` patterns: many slices are held and wanted by the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, Layout, TensorSpec

Flags = NDArray[np.bool_]


class SliceTransfer(NamedTuple):
    """Describe units of a tensor, from ``begin`` up to ``end`` of the undivided one, that go from rank to rank."""

    tensor: int
    begin: int
    end: int
    source: int
    destination: int


@dataclass(frozen=True, eq=False)
class SliceTransfers:
    """Hold transfers in ascending order of tensors, units, destinations and sources: the same order on all ranks.

    Attributes:
        tensors, begins, ends, sources, destinations, num_bytes: [E], int64, one entry a transfer.
    """

    tensors: Indices
    begins: Indices
    ends: Indices
    sources: Indices
    destinations: Indices
    num_bytes: Indices

    @property
    def columns(self) -> tuple[Indices, ...]:
        """Return all but the bytes, in the order of :class:`SliceTransfer`."""
        return self.tensors, self.begins, self.ends, self.sources, self.destinations

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[SliceTransfer]:
        return map(SliceTransfer._make, zip(*(column.tolist() for column in self.columns), strict=True))

    @classmethod
    def of(cls, slices: Slices, numbers: Indices, sources: Indices, destinations: Indices) -> SliceTransfers:
        """Return the transfers of slices, by their numbers, in order."""
        order = np.lexsort((sources, destinations, numbers))
        numbers, sources, destinations = numbers[order], sources[order], destinations[order]
        units = slices.tensors[numbers], slices.begins[numbers], slices.ends[numbers]
        return cls(*units, sources, destinations, slices.num_bytes[numbers])

    @classmethod
    def none(cls) -> SliceTransfers:
        """Return no transfers."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(6)))

    def at(self, entries: Indices) -> SliceTransfers:
        """Return the transfers of these numbers."""
        return SliceTransfers(*(column[entries] for column in (*self.columns, self.num_bytes)))

    def units_by_pair(self) -> dict[tuple[int, int], Indices]:
        """Return the ascending units that travel of a single tensor, by (source, destination) in ascending order."""
        runs: dict[tuple[int, int], list[Indices]] = {}
        for _, begin, end, *pair in self:
            runs.setdefault((pair[0], pair[1]), []).append(np.arange(begin, end))
        return {pair: np.concatenate(runs[pair]) for pair in sorted(runs)}


@dataclass(frozen=True, eq=False)
class Slices:
    """Hold the largest pieces of tensors that no cut of two layouts divides, in ascending order of tensors and units.

    Those that no rank wants, or of no bytes, are left out.

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
        starts, stops = (begins + units * ends // parts[of_slice] for ends in (number, number + 1))
        pieces = (self.tensors[of_slice], starts, stops, (stops - starts) * unit_bytes, self.patterns[of_slice])
        return Slices(*pieces, self.held, self.wanted)


def transfers(before: Layout, after: Layout, tensors: Sequence[TensorSpec] | None = None) -> SliceTransfers:
    """Return what travels so that every rank gets, once, what it wants in the layout after and does not hold before.

    The first rank that holds a slice sends it: where each unit has one holder there is no choice, and no plan sends
    less. Which of several holders should send, :mod:`zeroresize.policy.strategy.switches` says.
    """
    slices = common_slices(before, after, tensors)
    missing = (slices.wanted & ~slices.held)[slices.patterns]
    numbers, destinations = np.nonzero(missing)
    sources = slices.held.argmax(axis=1)[slices.patterns[numbers]]
    return SliceTransfers.of(slices, numbers, sources, destinations)


def common_slices(before: Layout, after: Layout, tensors: Sequence[TensorSpec] | None = None) -> Slices:
    """Return the slices between neighbouring cuts of both layouts.

    Args:
        tensors: of both layouts; None for tensors whose units are a byte each.

    Raises:
        ValueError: if the layouts are of other tensors or ranks, or if a slice is wanted that no rank holds.
    """
    num_tensors = before.num_tensors if tensors is None else len(tensors)
    if not before.num_ranks == after.num_ranks or {before.num_tensors, after.num_tensors} != {num_tensors}:
        raise ValueError(
            f"layouts of {before.num_tensors} tensors on {before.num_ranks} ranks and of {after.num_tensors} on "
            f"{after.num_ranks} do not belong together, or not to {num_tensors} tensors"
        )
    alike: dict[tuple[bytes, ...], list[int]] = {}  # tensors that both layouts cut in the same way
    for number in range(num_tensors):
        cuts = (*before.rows_of(number), *after.rows_of(number))
        alike.setdefault(tuple(rows.tobytes() for rows in cuts), []).append(number)
    patterns: dict[bytes, int] = {}
    held, wanted = [], []
    tables: list[tuple[Indices, ...]] = []
    for numbers in alike.values():
        rows = (*before.rows_of(numbers[0]), *after.rows_of(numbers[0]))
        bounds = np.unique(np.concatenate([part.ravel() for part in rows]))
        held_KR, wanted_KR = (_is_within(bounds[:-1], *rows[begin : begin + 2]) for begin in (0, 2))
        is_wanted = wanted_KR.any(axis=1)
        if not held_KR[is_wanted].any(axis=1).all():
            name = numbers[0] if tensors is None else tensors[numbers[0]].name
            raise ValueError(f"no rank holds all units of {name} that the new layout needs")
        pattern_numbers = []
        for kept in np.flatnonzero(is_wanted):
            key = held_KR[kept].tobytes() + wanted_KR[kept].tobytes()
            if key not in patterns:
                patterns[key] = len(patterns)
                held.append(held_KR[kept])
                wanted.append(wanted_KR[kept])
            pattern_numbers.append(patterns[key])
        columns = (bounds[:-1][is_wanted], bounds[1:][is_wanted], np.array(pattern_numbers, dtype=np.int64))
        tensor_of_slice = np.repeat(np.array(numbers), len(pattern_numbers))
        tables.append((tensor_of_slice, *(np.tile(column, len(numbers)) for column in columns)))
    none = np.zeros(0, dtype=np.int64)
    of_tensor, begins, ends, numbers_S = (np.concatenate(parts) for parts in zip((none,) * 4, *tables, strict=True))
    unit_bytes = np.array([1] * num_tensors if tensors is None else [spec.unit_bytes for spec in tensors], np.int64)
    sizes = (ends - begins) * unit_bytes[of_tensor]
    order = np.lexsort((begins, of_tensor))
    order = order[sizes[order] > 0]
    table = (np.array(flags, dtype=bool).reshape(-1, before.num_ranks) for flags in (held, wanted))
    return Slices(of_tensor[order], begins[order], ends[order], sizes[order], numbers_S[order], *table)


def _is_within(units: Indices, begins: Indices, ends: Indices) -> Flags:
    """[units, R]: whether each rank has each unit in one of its runs."""
    within: Flags = np.any((begins[:, None] <= units[:, None]) & (units[:, None] < ends[:, None]), axis=0)
    return within
