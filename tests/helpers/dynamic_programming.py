"""The partition whose slowest stage is fastest, by dynamic programming: what the balancer finds is held against it.

``L`` layers, ``S`` stages.
"""

from __future__ import annotations

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import NothingFitsError, PipelineLoad


def dynamic_programming_partition(load: PipelineLoad) -> Partition:
    """Return a partition with the fastest slowest stage, in O(S L²) time and O(L²) memory.

    Raises:
        NothingFitsError: if no partition fits into the memory limits.
    """
    ends = np.arange(load.num_layers + 1)
    is_empty = ends[None, :] <= ends[:, None]  # [begin, end]
    costs, sizes = (sums[None, :] - sums[:, None] for sums in (load.cost_sums, load.byte_sums))
    slowest = np.where(ends == 0, 0.0, np.inf)  # of the stages so far, by the layer with which they end
    begins = []
    for speed, limit, wait in zip(load.speeds, load.memory_limits, load.waits, strict=True):
        times = np.where(is_empty | (sizes > limit), np.inf, np.maximum(slowest[:, None], costs / speed + wait))
        begins.append(times.argmin(axis=0))
        slowest = times.min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise NothingFitsError("no partition fits into the memory limits")
    boundaries = [load.num_layers]
    for begin in reversed(begins):
        boundaries.append(int(begin[boundaries[-1]]))
    return Partition(tuple(reversed(boundaries)))
