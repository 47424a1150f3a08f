"""What a layer takes, as a + b · tokens + c · Σ length²: fewer numbers than a grid, and often further from the truth.

``K`` micro-batches, ``A`` lengths of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats, Indices


def features(sizes_K: Indices, lengths_KA: Indices, axes: tuple[int, ...]) -> Floats:
    """Return [K, 3 or 6]: ones, tokens and squares of lengths, padding included.

    With two lengths each has tokens and squares of its own, and their product stands for attention from one to the
    other.
    """
    sizes = sizes_K.astype(np.float64)
    seen = lengths_KA[:, list(axes)].astype(np.float64)
    columns = [np.ones(len(sizes)), *(sizes * seen.T), *(sizes * seen.T**2)]
    if len(axes) == 2:
        columns.append(sizes * seen[:, 0] * seen[:, 1])
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Hold the numbers of one kind of layer: a :class:`~zeroresize.policy.microbatches.stage_costs.LayerCosts`.

    Attributes:
        axes: which of a sample's lengths the layer sees.
        factors: [4, features] of seconds forward and backward, bytes of activations and of workspace, see
            :func:`features`.
    """

    axes: tuple[int, ...]
    factors: Floats

    def values(self, sizes_K: Indices, lengths_KA: Indices) -> Floats:
        """Return [4, K]: seconds forward and backward, bytes of activations and of workspace."""
        values: Floats = self.factors @ features(sizes_K, lengths_KA, self.axes).T
        return values
