"""Which columns of a layer are pruned: the first of an order that is drawn once an epoch.

So a change of γ adds to or takes from the same set, and the columns of one epoch stay pruned or kept together.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def random_order(num_columns: int, *, block: int, seed: int, epoch: int, rank: int, layer: int) -> NDArray[np.int64]:
    """ZERO-Rd: a permutation of the columns, the same for the same arguments on every machine.

    Args:
        num_columns: K of the layer on this rank.
        block: so many neighbouring columns stay together; the last block may be shorter.
        seed, epoch, rank, layer: what the permutation depends on; ``rank`` within the group, ``layer`` by position.
    """
    generator = np.random.default_rng([seed, epoch, rank, layer])
    order = generator.permutation(math.ceil(num_columns / block))
    columns = (order[:, None] * block + np.arange(block)).ravel()
    return columns[columns < num_columns]


def pruned_of_order(order: NDArray[np.int64], ratio: float, block: int) -> NDArray[np.int64]:
    """The first round(γK) columns of an order of all K, rounded half up to whole blocks, so that one block is left.

    Fewer where the last block of the layer, which may be shorter, is among them.
    """
    num_columns = len(order)
    num_blocks = math.ceil(num_columns / block)
    num_pruned = max(min(math.floor(ratio * num_columns / block + 0.5), num_blocks - 1), 0)
    is_first_of_block = order % block == 0
    ends = np.append(np.flatnonzero(is_first_of_block), num_columns)
    return order[: ends[num_pruned]]
