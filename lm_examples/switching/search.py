"""Which strategy trains which lengths: as the configuration says, or what measurements on these ranks make fastest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_examples.documents import MiniBatches, lengths_of
from zeroresize.strategy.length_range import LengthRange
from zeroresize.strategy.strategy import Strategy

#: Mini-batches whose lengths stand for those of all.
_NUM_SAMPLED = 8


@dataclass(frozen=True)
class Choice:
    """What a run is trained under.

    Attributes:
        found: by a search; None where the configuration says it.
    """

    ranges: tuple[LengthRange, ...]
    home: Strategy
    found: None = None


def sample_of(batches: MiniBatches) -> NDArray[np.int64]:
    """Lengths of the sequences of the first mini-batches."""
    return np.concatenate([lengths_of(batches.training(step)) for step in range(1, _NUM_SAMPLED + 1)])
