"""Which consecutive layers each stage of a pipeline has.

``L`` layers, ``S`` stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroresize.plan.layout import Layout
from zeroresize.plan.transfers import transfers


class LayerTransfer(NamedTuple):
    """Describe a layer that changes stages."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True)
class Partition:
    """Divide layers into consecutive ones for every stage, at least one each.

    Attributes:
        boundaries: [S + 1]: stage s has the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.

    Raises:
        ValueError: unless the boundaries begin with 0 and rise.
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _rise_from_zero(self.boundaries):
            raise ValueError(
                f"boundaries={self.boundaries} are not allowed: they begin with 0 and rise, as every stage has layers"
            )

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> Partition:
        """Return equally many layers for every stage; where they do not divide, the first stages have one more.

        Raises:
            ValueError: if there are fewer layers than stages.
        """
        require_enough_layers(num_layers, num_stages)
        each, more = divmod(num_layers, num_stages)
        return cls(tuple(stage * each + min(stage, more) for stage in range(num_stages + 1)))

    @classmethod
    def of(cls, boundaries: Sequence[int], num_layers: int, num_stages: int) -> Partition:
        """Return the partition with these boundaries.

        Raises:
            ValueError: if they do not divide ``num_layers`` layers over ``num_stages`` stages, at least one for each.
        """
        require_enough_layers(num_layers, num_stages)
        checked = tuple(map(int, boundaries))
        if len(checked) != num_stages + 1 or checked[-1] != num_layers or not _rise_from_zero(checked):
            raise ValueError(
                f"boundaries {list(checked)} do not divide {num_layers} layers over {num_stages} stages: they must be "
                f"{num_stages + 1} rising whole numbers from 0 to {num_layers}, so that every stage has at least one "
                "layer"
            )
        return cls(checked)

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return self.boundaries[-1]

    @property
    def num_stages(self) -> int:
        """Return S, the number of stages."""
        return len(self.boundaries) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many layers each stage has."""
        return tuple(np.diff(self.boundaries).tolist())

    @property
    def stages(self) -> list[int]:
        """Return [L] the stage of each layer."""
        return np.repeat(np.arange(self.num_stages), self.counts).tolist()

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def transfers_to(self, after: Partition, stages: Sequence[int] | None = None) -> tuple[LayerTransfer, ...]:
        """Return the layers that have another stage in ``after``, ascending; each travels once, straight there.

        Args:
            after: of the same layers.
            stages: which of this partition's stages those of ``after`` are; the same ones where not given.

        Raises:
            ValueError: if the partitions are of different layers, or ``stages`` do not name those of ``after``.
        """
        named = np.arange(after.num_stages) if stages is None else np.asarray(stages)
        if after.num_layers != self.num_layers or len(named) != after.num_stages:
            raise ValueError(
                f"{self.num_layers} layers on {self.num_stages} stages cannot become {after.num_layers} on {len(named)}"
            )
        owners = np.array(self.stages), np.repeat(named, after.counts)
        num_ranks = int(max(map(np.max, owners))) + 1
        layout_before, layout_after = (Layout.of_owners(of_layers, num_ranks) for of_layers in owners)
        moved = transfers(layout_before, layout_after)
        return tuple(
            LayerTransfer(layer, source, destination)
            for _, begin, end, source, destination in moved
            for layer in range(begin, end)
        )


def require_enough_layers(num_layers: int, num_stages: int) -> None:
    """Raise ValueError unless each stage can have a layer."""
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided over {num_stages} stages: each has at least one")


def _rise_from_zero(boundaries: Sequence[int]) -> bool:
    rises = all(begin < end for begin, end in itertools.pairwise(boundaries))
    return len(boundaries) >= 2 and boundaries[0] == 0 and rises
