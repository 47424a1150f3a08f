"""How much of what micro-batches compute is no padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroresize.policy.microbatches.plan import Floats, Indices, MicroBatch, shapes_of


def padding_efficiency(microbatches: Sequence[MicroBatch], lengths_NA: Indices) -> Floats:
    """Return [A] tokens of the samples as a share of those that are computed (DynaPipe, section 2.2)."""
    sizes, lengths_KA = shapes_of(microbatches)
    samples = np.concatenate([each.samples for each in microbatches])
    shares: Floats = lengths_NA[samples].sum(axis=0) / (sizes[:, None] * lengths_KA).sum(axis=0)
    return shares
