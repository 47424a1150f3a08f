"""What was measured of a model's layers, kept as a file: seconds and bytes on a grid, for each way of recomputation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroresize.policy.microbatches.grid_costs import LayerGrid
from zeroresize.policy.microbatches.micro_batch import MicroBatchCosts
from zeroresize.policy.microbatches.stage_costs import HandedBytes, StageCosts
from zeroresize.utils.codec import decoded, encoded
from zeroresize.utils.hashing import digest


@dataclass(frozen=True)
class CostTable:
    """Hold what the layers of a model take.

    Attributes:
        kinds: [L] of each layer.
        names: of a micro-batch's sizes, the number of rows first.
        grids: by what is computed again in backwards, of each kind.
        device: on which they were measured.
        handed: [L − 1] of which sizes the bytes are that layers hand on, see
            :class:`~zeroresize.policy.microbatches.stage_costs.StageCosts`; empty where nobody knows.

    Raises:
        ValueError: for a kind that was not measured.
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    grids: Mapping[str, Mapping[str, LayerGrid]]
    device: str
    handed: tuple[HandedBytes, ...] = ()

    def __post_init__(self) -> None:
        for recomputation, by_kind in self.grids.items():
            missing = sorted(set(self.kinds) - set(by_kind))
            if missing:
                raise ValueError(f"layers of the kinds {missing} have no costs where {recomputation} is computed again")
        if not self.grids:
            raise ValueError("no way of recomputation was measured: at least one is needed")

    def costs(self, boundaries: Sequence[int]) -> dict[str, MicroBatchCosts]:
        """Return what the stages of a pipeline take, by what is computed again.

        Args:
            boundaries: [S + 1] of the stages.

        Raises:
            ValueError: as :class:`~zeroresize.policy.microbatches.stage_costs.StageCosts`.
        """
        return {
            recomputation: StageCosts(self.kinds, by_kind, tuple(boundaries), self.names, self.handed)
            for recomputation, by_kind in self.grids.items()
        }

    @property
    def longest(self) -> tuple[int, ...]:
        """Return [A] the longest samples that were measured."""
        longest = [0] * (len(self.names) - 1)
        for by_kind in self.grids.values():
            for grid in by_kind.values():
                for axis, lengths in zip(grid.axes, grid.lengths, strict=True):
                    longest[axis] = max(longest[axis], lengths[-1])
        return tuple(longest)

    def require_model(self, kinds: Sequence[str], names: Sequence[str]) -> None:
        """Check that the table is of a model with layers of these kinds, whose micro-batches have these sizes.

        Raises:
            ValueError: naming what differs.
        """
        if tuple(names) != self.names:
            raise ValueError(f"the costs are of micro-batches with {list(self.names)}: the model has {list(names)}")
        if len(kinds) != len(self.kinds):
            raise ValueError(f"the costs are of a model of {len(self.kinds)} layers: this one has {len(kinds)}")
        for number, (measured, wanted) in enumerate(zip(self.kinds, kinds, strict=True)):
            if measured != wanted:
                raise ValueError(f"the costs are of another model: layer {number} was {measured}, and is {wanted}")

    @property
    def fingerprint(self) -> str:
        """Return a digest of all numbers."""
        return digest(json.dumps(encoded(self), sort_keys=True)).hex()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        Path(path).write_text(json.dumps(encoded(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: as the class does, and for what is no table, naming the file.
        """
        try:
            return decoded(cls, json.loads(Path(path).read_text(encoding="utf-8")), "costs")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
