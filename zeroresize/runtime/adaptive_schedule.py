"""Orders that leave stages something to do when a micro-batch is late, as far as memory allows (DynaPipe, section 5).

``S`` stages, ``M`` micro-batches. Memory is bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from zeroresize.runtime.schedules import Operation
from zeroresize.runtime.timeline import Floats


def adaptive_orders(
    activation_bytes: Floats,
    limits: Sequence[float] | Floats,
    num_ahead: int | None = None,
    workspace_bytes: Floats | None = None,
) -> list[list[Operation]]:
    """Return [S] orders by memory-aware cyclic scheduling (DynaPipe, Algorithm 1).

    In each cycle a stage does one backward and one forward of those that were ready when the cycle began, in the order
    in which they became so. A forward waits while its activations do not fit beside those that are kept. Micro-batches
    enter by their numbers.

    Args:
        activation_bytes: [M, S] that each micro-batch keeps on each stage from its forward to its backward.
        limits: [S] bytes at most; ``math.inf`` for no limit.
        num_ahead: micro-batches that are under way at once, at most; None for as many as fit. With S, stages that take
            equally long do as in 1F1B.
        workspace_bytes: [M, S] that each needs beside what is kept while it runs, forward and backward; None for none.

    Raises:
        ValueError: for a micro-batch that alone does not fit, naming it, its stage and the limit.
    """
    activation_bytes = np.asarray(activation_bytes, dtype=np.float64)
    num_microbatches, num_stages = activation_bytes.shape
    limits_S = np.asarray(limits, dtype=np.float64)
    workspace = np.zeros_like(activation_bytes) if workspace_bytes is None else np.asarray(workspace_bytes)
    too_large = np.argwhere(activation_bytes + workspace > limits_S)
    if len(too_large):
        microbatch, stage = too_large[0].tolist()
        raise ValueError(
            f"micro-batch {microbatch} keeps {activation_bytes[microbatch, stage]:.0f} bytes of activations on stage "
            f"{stage} and needs {workspace[microbatch, stage]:.0f} more while it runs: at most "
            f"{limits_S[stage]:.0f} are allowed"
        )
    needed, besides, most = activation_bytes.tolist(), workspace.tolist(), limits_S.tolist()
    orders: list[list[Operation]] = [[] for _ in range(num_stages)]
    forwards: list[deque[int]] = [deque() for _ in range(num_stages)]
    backwards: list[deque[int]] = [deque() for _ in range(num_stages)]
    forwards[0].extend(range(num_microbatches))
    kept = [0.0] * num_stages
    kept_besides: list[list[float]] = [[] for _ in range(num_stages)]  # of those that still have to run their backward
    under_way, num_left = 0, 2 * num_stages * num_microbatches
    most_under_way = math.inf if num_ahead is None else num_ahead
    while num_left:
        new_forwards: list[tuple[int, int]] = []
        new_backwards: list[tuple[int, int]] = []
        for stage in range(num_stages):
            if backwards[stage]:
                microbatch = backwards[stage].popleft()
                kept[stage] -= needed[microbatch][stage]
                kept_besides[stage].remove(besides[microbatch][stage])
                orders[stage].append(Operation(False, microbatch))
                num_left -= 1
                if stage:
                    new_backwards.append((stage - 1, microbatch))
                else:
                    under_way -= 1
            if not forwards[stage] or (not stage and under_way >= most_under_way):
                continue
            microbatch = forwards[stage][0]
            largest = max(besides[microbatch][stage], max(kept_besides[stage], default=0.0))
            if kept[stage] + needed[microbatch][stage] + largest > most[stage] * (1.0 + 1e-12):
                continue
            forwards[stage].popleft()
            kept_besides[stage].append(besides[microbatch][stage])
            kept[stage] += needed[microbatch][stage]
            orders[stage].append(Operation(True, microbatch))
            num_left -= 1
            under_way += not stage
            if stage + 1 < num_stages:
                new_forwards.append((stage + 1, microbatch))
            else:
                new_backwards.append((stage, microbatch))
        for stage, microbatch in new_forwards:
            forwards[stage].append(microbatch)
        for stage, microbatch in new_backwards:
            backwards[stage].append(microbatch)
    return orders
