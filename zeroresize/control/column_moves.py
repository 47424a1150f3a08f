"""What is known of columns goes with their units to the rank that owns them now, and their statistic begins anew.

Only row-parallel layers of segments have columns that change hands: a column-parallel layer's input is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zeroresize.comm.exchange import Exchange
from zeroresize.control.setup import Layers
from zeroresize.layers.segments import all_segments, homes_of_layers, present_work_of_layers
from zeroresize.measure.column_statistics import ColumnStatistic
from zeroresize.policy.tensor.columns.selector import Columns, ColumnSelector, Floats

#: Numbers that travel for each column: its home, and what is known of it.
_NUMBERS = 5


@dataclass(frozen=True)
class SeenOfEpoch:
    """Holds what a statistic has seen of an epoch, of the units of every segment that this rank owned then."""

    state: Mapping[str, Tensor]  # of the statistic; empty without one
    units: Mapping[str, list[int]]
    steps_unseen: int  # of how many of the epoch's steps the statistic tells nothing


class ColumnMoves:
    """Lets a selector hold the columns of the units that this rank owns, and a statistic see them.

    ``exchange`` is None where nothing is known of columns that would have to travel; ``set_aside`` is what the
    statistic has seen, while units are at home for a visit only.
    """

    def __init__(
        self,
        selector: ColumnSelector,
        statistic: ColumnStatistic | None,
        layers: Layers,
        rank: int,
        exchange: Exchange | None,
    ) -> None:
        self._selector, self._statistic, self._layers = selector, statistic, layers
        self._rank, self._exchange = rank, exchange
        self.set_aside: SeenOfEpoch | None = None

    @property
    def units(self) -> dict[str, list[int]]:
        """Return the units that this rank owns of every segment, by name, ascending."""
        return {segment.name: segment.owned.units_of(self._rank).tolist() for segment in all_segments(self._layers)}

    @property
    def seen(self) -> SeenOfEpoch:
        """Return what the statistic has seen of the epoch, what is set aside included."""
        if self.set_aside is not None:
            return self.set_aside
        state = self._statistic.state_dict() if self._statistic is not None else {}
        return SeenOfEpoch(state, self.units, self._selector.state.steps_unseen)

    def restart_statistic(self) -> None:
        """Begin the epoch anew for the statistic, with the layers as they are."""
        if self._statistic is not None:
            self._statistic.restart()
            self._selector.state.steps_unseen = self._selector.state.steps_of_epoch

    def see_on(self, seen: SeenOfEpoch) -> None:
        """Let the statistic go on from ``seen`` if this rank owns just the same units, else begin anew."""
        if self._statistic is None:
            return
        shapes = {name: value.shape for name, value in self._statistic.state_dict().items()}
        fits = {name: value.shape for name, value in seen.state.items()} == shapes
        if fits and seen.units == self.units:
            self._statistic.load_state_dict(seen.state)
            self._selector.state.steps_unseen = seen.steps_unseen
        else:
            self.restart_statistic()

    def follow(self, *, gathers: bool = True) -> None:
        """Let the selector hold the columns that are here now, with what the ranks know that held them; collective.

        Where the other ranks do not come, or ``gathers`` is False as they will not, what came here begins anew.
        """
        units = self.units
        homes = homes_of_layers(self._layers, lambda layer: units[layer.segment.name] if layer.segment else ())
        arrived = None
        try:
            if gathers and self._exchange is not None and homes:
                arrived = _arrived(homes, self._exchange.gather(self._leaving(homes)))
        finally:
            held = self._selector.homes
            changed = {name: here for name, here in homes.items() if not np.array_equal(here, held[name])}
            if changed:
                self._selector.hold(changed, arrived, present_work_of_layers(self._layers))

    def _leaving(self, homes: dict[str, Columns]) -> list[float]:
        """Of each layer how many columns are no longer here, and their numbers."""
        numbers: list[float] = []
        for name, here in homes.items():
            held = self._selector.homes[name]
            gone = np.flatnonzero(~np.isin(held, here))
            table = np.concatenate([held[gone][None].astype(np.float64), self._selector.known_of(name, gone)])
            numbers += [float(len(gone)), *table.ravel().tolist()]
        return numbers


def _arrived(homes: dict[str, Columns], of_ranks: list[list[float]]) -> dict[str, tuple[Columns, Floats]]:
    """What :meth:`ColumnMoves._leaving` told on all ranks, by layer."""
    tables: dict[str, list[Floats]] = {name: [] for name in homes}
    for numbers in map(np.asarray, of_ranks):
        begin = 0
        for name in homes:
            end = begin + 1 + _NUMBERS * int(numbers[begin])
            tables[name].append(numbers[begin + 1 : end].reshape(_NUMBERS, -1))
            begin = end
    whole = {name: np.concatenate(of_layer, axis=1) for name, of_layer in tables.items()}
    return {name: (table[0].astype(np.int64), table[1:]) for name, table in whole.items()}
