"""What a switch between layouts takes at least: plans are held against it.

``R`` ranks, ``N`` nodes, ``C`` patterns of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, Layout, TensorSpec
from zeroresize.plan.transfers import common_slices
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds


def lower_bound(
    before: Layout, after: Layout, tensors: Sequence[TensorSpec], nodes: Sequence[int], links: LinkSpeeds
) -> float:
    """Return seconds that any plan for weights takes at least, as :meth:`SwitchPlan.seconds` counts them.

    A plan is any in which ranks get what they lack from ranks that hold it before. Every rank receives what it lacks,
    and from other nodes what nobody on its node holds. Likewise all holders of the same slices together, and their
    nodes, send what is lacking of these.
    """
    nodes_R = np.unique(np.asarray(nodes), return_inverse=True)[1].ravel()
    slices = common_slices(before, after, tensors)
    if not len(slices):
        return 0.0
    sizes = slices.num_bytes.astype(np.float64)
    bytes_C = np.bincount(slices.patterns, weights=sizes, minlength=len(slices.held))
    missing_CR = slices.wanted & ~slices.held
    on_node_RN = (nodes_R[:, None] == np.unique(nodes_R)).astype(np.float64)
    is_on_node_CN = slices.held @ on_node_RN > 0.0
    far_CR = missing_CR & ~is_on_node_CN[:, nodes_R]
    number_of: dict[bytes, int] = {}
    holders_C = [number_of.setdefault(held.tobytes(), len(number_of)) for held in slices.held]

    def most(received: NDArray[Any], num_missing_C: Indices, num_senders_C: Indices) -> float:
        sent = np.bincount(holders_C, weights=bytes_C * num_missing_C / num_senders_C)
        return float(max(received.max(), sent.max()))

    any_bytes = most(bytes_C @ missing_CR, missing_CR.sum(axis=1), slices.held.sum(axis=1))
    far_bytes = most(bytes_C @ far_CR, far_CR.sum(axis=1), slices.held.sum(axis=1))
    node_bytes = most((bytes_C @ far_CR) @ on_node_RN, far_CR.sum(axis=1), is_on_node_CN.sum(axis=1))
    seconds = max(
        any_bytes / (links.within_bytes_per_s + links.between_bytes_per_s),
        far_bytes / links.between_bytes_per_s,
        node_bytes / links.node_bytes_per_s,
    )
    return seconds + (links.latency_s if missing_CR.any() else 0.0)
