"""Lengths of sequences like those of CommonCrawl and GitHub (HotSPa, Fig. 3): most are short, most work is not.

The slides draw the distributions without their numbers. Their Table 3 tells how long one strategy for all took for the
sequences of each range, and packed sequences take about as long as they have tokens; so those seconds stand for each
range's share of the tokens. Within a range the logarithm of the length is uniform.

``N`` sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

#: The slides' ranges, in tokens; nothing is shorter than the first number, and what is longer than the last one is cut.
BOUNDS = (64, 1024, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class LengthDistribution:
    """Describe how long sequences are, by ranges of lengths.

    Attributes:
        bounds: [ranges + 1] tokens, rising: range r has lengths above entry r, up to entry r + 1.
        tokens: [ranges] that are in sequences of each range, in any unit.
    """

    bounds: tuple[int, ...]
    tokens: tuple[float, ...]

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """Return [ranges] shares of the number of sequences."""
        bounds = np.array(self.bounds, dtype=np.float64)
        mean_lengths = np.diff(bounds) / np.diff(np.log(bounds))
        counts = np.array(self.tokens) / mean_lengths
        return counts / counts.sum()

    def draw(self, num_sequences: int, max_length: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw [N] lengths in tokens, scaled so that the longest are ``max_length``."""
        logs = np.log(self.bounds)
        ranges = random.choice(len(self.tokens), size=num_sequences, p=self.shares)
        lengths = np.exp(random.uniform(logs[ranges], logs[ranges + 1]))
        return np.clip(np.ceil(lengths * (max_length / self.bounds[-1])), 1, max_length).astype(np.int64)


DISTRIBUTIONS = {
    "commoncrawl": LengthDistribution(BOUNDS, (42.1, 12.5, 3.5, 2.9, 2.4)),
    "github": LengthDistribution(BOUNDS, (34.9, 38.4, 25.0, 27.3, 53.0)),
}
