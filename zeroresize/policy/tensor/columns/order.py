"""Which columns of a layer are pruned: the first of an order that is drawn once an epoch.

So a change of γ adds to or takes from the same set, and the columns of one epoch stay pruned or kept together.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import LEAST_SHARE

#: Products over a multiple of so many columns are fast; over a few more or less they take longer.
ALIGNMENT = 8
#: γ is not changed by more than this for the sake of it.
_MOST_SHIFT = 0.025


def random_order(num_columns: int, *, block: int, seed: int, epoch: int, rank: int, layer: int) -> NDArray[np.int64]:
    """Return ZERO-Rd's permutation of the columns, the same for the same arguments on every machine.

    Args:
        num_columns: K of the layer on this rank.
        block: so many neighbouring columns stay together; the last block may be shorter.
        seed, epoch, rank, layer: what the permutation depends on; ``rank`` within the group, ``layer`` by position.
    """
    generator = np.random.default_rng([seed, epoch, rank, layer])
    return columns_of_blocks(generator.permutation(math.ceil(num_columns / block)), num_columns, block=block)


def columns_of_blocks(blocks: NDArray[np.int64], num_columns: int, *, block: int) -> NDArray[np.int64]:
    """Return the columns of ``blocks``, one after the other; the last block of the layer may be shorter."""
    columns = (blocks[:, None] * block + np.arange(block)).ravel()
    return columns[columns < num_columns]


def order_without_priority(
    config: BalanceConfig, num_columns: int, *, epoch: int = 0, rank: int = 0, layer: int = 0
) -> NDArray[np.int64]:
    """Return the columns' order in the epoch as long as no statistic ranks them.

    Random, but in mode "mig" as they stand: whatever is lent comes back, and neighbours need no gathering.
    """
    if config.mode == "mig":
        return np.arange(num_columns)
    return random_order(num_columns, block=config.block, seed=config.seed, epoch=epoch, rank=rank, layer=layer)


def order_of_homes(
    config: BalanceConfig, homes: NDArray[np.int64], num_at_home: int, *, epoch: int, layer: int
) -> NDArray[np.int64]:
    """Return the order of the columns that a rank holds, where units of other ranks may be among them.

    Each column stands as early as in its home rank's order of :func:`order_without_priority`. So the order follows
    from which columns the rank holds alone, columns that stay keep their order when others come or go, and a rank that
    holds its own columns has the order that it always had.

    Args:
        config: how to balance.
        homes: [K], of every column here the rank that holds it at even shares × ``num_at_home`` + its place there.
        num_at_home: how many columns of the layer every rank holds at even shares.
        epoch, layer: as of :func:`random_order`.
    """
    if config.mode == "mig":
        return np.arange(len(homes))
    ranks, places = homes // num_at_home, homes % num_at_home
    turns = np.empty(len(homes), dtype=np.int64)
    for rank in np.unique(ranks).tolist():
        turns_at_home = np.empty(num_at_home, dtype=np.int64)
        order = order_without_priority(config, num_at_home, epoch=epoch, rank=rank, layer=layer)
        turns_at_home[order] = np.arange(num_at_home)
        turns[ranks == rank] = turns_at_home[places[ranks == rank]]
    firsts = np.arange(0, len(homes), config.block)
    return columns_of_blocks(np.lexsort((ranks[firsts], turns[firsts])), len(homes), block=config.block)


def pruned_of_order(order: NDArray[np.int64], ratio: float, block: int, max_ratio: float = 1.0) -> NDArray[np.int64]:
    """Return the first round(γK) columns of an order of all K.

    Their number is rounded half up to whole blocks, so that one block is left.

    Fewer where the last block of the layer, which may be shorter, is among them, or where it would be more than
    γ_max K.
    """
    num_columns = len(order)
    num_blocks = math.ceil(num_columns / block)
    num_pruned = max(min(_rounded(ratio * num_columns / block), num_blocks - 1), 0)
    is_first_of_block = order % block == 0
    ends = np.append(np.flatnonzero(is_first_of_block), num_columns)
    while ends[num_pruned] > max_ratio * num_columns + LEAST_SHARE:
        num_pruned -= 1
    return order[: ends[num_pruned]]


def aligned_ratio(num_columns: int, ratio: float, max_ratio: float) -> float:
    """Return the ratio nearest to γ, no more than γ_max, that keeps a multiple of ``ALIGNMENT`` columns.

    γ itself if it is 0, or if the layer has so few columns that this would be another ratio altogether.
    """
    if num_columns == 0:
        return ratio
    num_kept = ALIGNMENT * round((1.0 - ratio) * num_columns / ALIGNMENT)
    fewest_kept = max(math.ceil((1.0 - max_ratio) * num_columns - LEAST_SHARE), 1)
    num_kept = min(max(num_kept, ALIGNMENT * math.ceil(fewest_kept / ALIGNMENT)), num_columns)
    aligned = 1.0 - num_kept / num_columns
    return aligned if ratio > 0.0 and abs(aligned - ratio) <= _MOST_SHIFT else ratio


def decided_columns(order: NDArray[np.int64], ratio: float, block: int, max_ratio: float) -> NDArray[np.int64]:
    """Return the first columns of an order, for a ratio that a controller chose.

    They are about γK, as many as are fast to multiply.
    """
    if block == 1:
        ratio = aligned_ratio(len(order), ratio, max_ratio)
    return pruned_of_order(order, ratio, block, max_ratio)


def num_lent(num_columns: int, ratio: float, *, is_forced: bool = True) -> int:
    """Return how many of K columns a rank lends at γ: round(γK), half up.

    Unless the ratio is forced, a multiple of ``ALIGNMENT`` nearby, and so few that the rank's speed can still be told.
    """
    num_exact = min(_rounded(ratio * num_columns), num_columns)
    if is_forced:
        return num_exact
    most = max(num_columns - ALIGNMENT, num_columns // 2)
    num_exact = min(num_exact, most)
    num_aligned = ALIGNMENT * _rounded(num_exact / ALIGNMENT)
    is_near = 0 < num_aligned <= most and abs(num_aligned - num_exact) <= _MOST_SHIFT * num_columns
    return num_aligned if is_near else num_exact


def _rounded(number: float) -> int:
    """The nearest whole number, half up."""
    return math.floor(number + 0.5)
