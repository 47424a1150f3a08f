"""In which order samples are cut into micro-batches: neighbours should be alike (DynaPipe, section 4).

``N`` samples, ``A`` lengths of each.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Indices

SampleOrder = Literal["sorted", "tour"]
#: Seconds that the solver has to improve a tour.
_SECONDS = 0.2


def ordered(lengths_NA: Indices, order: SampleOrder = "sorted") -> Indices:
    """Return [N] the samples' numbers in an order in which neighbours are of similar lengths.

    "sorted": by the first length, then by the second one. "tour": pairs of lengths are points, visited on a short way
    of a travelling salesman; with one length that is the same.

    Raises:
        ImportError: for a tour without its solver, naming the extra that brings it.
    """
    by_length: Indices = np.lexsort(lengths_NA.T[::-1])
    if order == "sorted" or lengths_NA.shape[1] == 1 or len(lengths_NA) < 4:
        return by_length
    return _tour(lengths_NA, by_length)


def _tour(lengths_NA: Indices, by_length: Indices) -> Indices:
    """The tour without its longest edge, from its shorter end; equal points are visited together."""
    try:
        from fast_tsp import find_tour
    except ImportError as error:
        raise ImportError('order="tour" needs a solver: pip install "zeroresize[microbatches]"') from error
    points, place_of = np.unique(lengths_NA, axis=0, return_inverse=True)
    if len(points) < 4:
        return by_length
    distances = np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2)
    tour = np.array(find_tour(distances.tolist(), duration_seconds=_SECONDS), dtype=np.int64)
    longest = int(distances[tour, np.roll(tour, -1)].argmax())
    path = np.roll(tour, -(longest + 1))
    if points[path[-1]].sum() < points[path[0]].sum():
        path = path[::-1]
    rank_of = np.empty(len(path), dtype=np.int64)
    rank_of[path] = np.arange(len(path))
    order: Indices = np.argsort(rank_of[place_of.ravel()], kind="stable")
    return order
