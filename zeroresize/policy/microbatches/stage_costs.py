"""What the stages of a pipeline take for micro-batches, from what their layers do.

``L`` layers, ``S`` stages, ``K`` micro-batches, ``A`` lengths of a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.microbatches.micro_batch import Floats, Indices, Prices

#: Of a tensor that a layer hands on: bytes of an element, then its dimensions: numbers, and names of sizes.
HandedBytes = tuple[tuple[int | str, ...], ...]


class LayerCosts(Protocol):
    """What one kind of layer takes."""

    def values(self, sizes_K: Indices, lengths_KA: Indices) -> Floats:
        """Return [4, K]: seconds forward and backward, bytes of activations and of workspace."""


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Tell what each stage takes: a :class:`~zeroresize.policy.microbatches.micro_batch.MicroBatchCosts`.

    Attributes:
        kinds: [L] of each layer; layers of one kind cost the same.
        costs: of each kind.
        boundaries: [S + 1] stage s has the layers from entry s up to entry s + 1.
        names: of a micro-batch's sizes, the number of rows first.
        handed: [L − 1] of which sizes the bytes are that layers hand on; empty where nobody knows. A stage but the last
            keeps what it hands on, as the next layer, which counts it, is elsewhere.

    Raises:
        ValueError: for a kind without costs, or boundaries of other layers.
    """

    kinds: tuple[str, ...]
    costs: Mapping[str, LayerCosts]
    boundaries: tuple[int, ...]
    names: tuple[str, ...] = ()
    handed: tuple[HandedBytes, ...] = ()

    def __post_init__(self) -> None:
        missing = sorted(set(self.kinds) - set(self.costs))
        if missing:
            raise ValueError(f"layers of the kinds {missing} have no costs: there are those of {sorted(self.costs)}")
        Partition.of(self.boundaries, len(self.kinds), self.num_stages)

    @property
    def num_stages(self) -> int:
        """Return S."""
        return len(self.boundaries) - 1

    def prices(self, sizes_K: Indices, lengths_KA: Indices) -> Prices:
        """Return what each micro-batch takes on each stage.

        A layer's workspace is needed while those behind it have not begun, in the forward, or keep nothing any more, in
        the backward. So that of a stage is the most that any of its layers needs beyond what they all keep together.

        Raises:
            ValueError: for lengths that are longer than what was measured, naming them.
        """
        of_kind = {kind: self.costs[kind].values(sizes_K, lengths_KA) for kind in dict.fromkeys(self.kinds)}
        total = np.zeros((3, len(sizes_K), self.num_stages))
        peak_KS = np.zeros((len(sizes_K), self.num_stages))
        for stage, runs in enumerate(self._runs):
            for kind, count in runs:
                total[:, :, stage] += count * of_kind[kind][:3]
                peak_KS[:, stage] = np.maximum(peak_KS[:, stage], total[2, :, stage] + of_kind[kind][3])
        forward_s, backward_s, kept = total
        with np.errstate(invalid="ignore"):
            workspace = np.where(np.isfinite(kept), np.maximum(peak_KS - kept, 0.0), np.inf)
        if self.handed:
            sizes_of = dict(zip(self.names, (sizes_K, *lengths_KA.T), strict=True))
            for stage, end in enumerate(self.boundaries[1:-1]):
                kept[:, stage] += _num_bytes(self.handed[end - 1], sizes_of)
        return Prices(forward_s, backward_s, kept, workspace)

    @cached_property
    def _runs(self) -> list[list[tuple[str, int]]]:
        """[S] kinds of neighbouring layers, with how many there are."""
        stages = itertools.pairwise(self.boundaries)
        return [
            [(kind, len(list(run))) for kind, run in itertools.groupby(self.kinds[begin:end])] for begin, end in stages
        ]


def _num_bytes(handed: HandedBytes, sizes_of: Mapping[str, Indices]) -> Floats:
    """[K] bytes of all tensors of each micro-batch."""
    total = np.zeros(len(next(iter(sizes_of.values()))))
    for dims in handed:
        of_tensor = np.ones(len(total))
        for dim in dims:
            of_tensor = of_tensor * (sizes_of[dim] if isinstance(dim, str) else dim)
        total += of_tensor
    return total
