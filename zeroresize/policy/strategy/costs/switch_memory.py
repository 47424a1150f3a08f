"""How much memory a switch takes: two sets of weights, gradients at both ends, the optimizer's state, and messages.

``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices
from zeroresize.policy.strategy.switches.transfers import MAX_MESSAGE_BYTES, SwitchPlan


def switch_bytes(
    before: Indices,
    after: Indices,
    optimizer_strategy: Indices,
    plans: Sequence[SwitchPlan],
    *,
    is_optimizer_strategy: bool,
    optimizer_ratio: float = 2.0,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> NDArray[np.float64]:
    """Return [R] the most bytes that each rank holds during a switch, which has no activations.

    Args:
        before, after, optimizer_strategy: [R] bytes of weights under the strategy that is left, the next one, and the
            optimizer's.
        plans: of all that travels: weights and, from another strategy than the optimizer's, gradients.
        is_optimizer_strategy: whether the strategy that is left is the optimizer's, whose gradients stay.
        optimizer_ratio: bytes of optimizer state for a byte of weights.
        max_bytes: of messages that a rank sends and receives at once.
    """
    gradients = optimizer_strategy + (0 if is_optimizer_strategy else before)
    return before + after + gradients + optimizer_ratio * optimizer_strategy + message_bytes(plans, max_bytes)


def message_bytes(plans: Sequence[SwitchPlan], max_bytes: int = MAX_MESSAGE_BYTES) -> Indices:
    """Return [R] bytes of memory that the messages of plans that are carried out together take at most.

    What fits into one round lies in one buffer. Of several rounds, the next is packed while one travels. Sums inside
    nodes have buffers of their own.
    """
    num_bytes, summed_bytes = (np.zeros(len(plans[0].nodes), dtype=np.int64) for _ in range(2))
    for plan in plans:
        num_bytes += plan.sent_within + plan.sent_between + plan.received_within + plan.received_between
        summed_bytes += plan.summed_bytes.sum(axis=0)
    return _buffer_bytes(num_bytes, max_bytes) + _buffer_bytes(summed_bytes, max_bytes)


def _buffer_bytes(num_bytes: Indices, max_bytes: int) -> Indices:
    return num_bytes if num_bytes.max() <= max_bytes // 2 else np.minimum(2 * num_bytes, max_bytes)
