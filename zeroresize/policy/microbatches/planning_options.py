"""How iterations are planned.

``A`` lengths of a sample, ``D`` replicas, ``S`` stages.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats
from zeroresize.policy.microbatches.sample_order import SampleOrder
from zeroresize.policy.microbatches.schedule_choice import ScheduleName
from zeroresize.utils.value_checks import at_least, number, one_of

#: "dynamic": by dynamic programming; "packing", "fixed", "tokens": see
#: :mod:`~zeroresize.policy.microbatches.baselines`.
Method = Literal["dynamic", "packing", "fixed", "tokens"]


@dataclass(frozen=True)
class PlanningOptions:
    """Say how iterations are planned.

    Attributes:
        num_replicas: D.
        memory_limit: bytes of a stage at most, of activations and of what a micro-batch needs while it runs.
        method: how samples become micro-batches.
        size: of "packing" rows, of "fixed" samples, and of "tokens" padded tokens of a micro-batch.
        row_lengths: [A] tokens of a row that "packing" fills.
        order: of the samples, before they are cut.
        schedule: of the stages.
        num_clusters: of micro-batches, whose order is chosen; 1 leaves the order as it is.
        slowness: [D][S] χ: how many times its normal time each stage of each replica takes; empty where none is slow.

    Raises:
        ValueError: naming what is not allowed.
    """

    num_replicas: int = 1
    memory_limit: float = math.inf
    method: Method = "dynamic"
    size: int = 1
    row_lengths: tuple[int, ...] = ()
    order: SampleOrder = "sorted"
    schedule: ScheduleName = "adaptive"
    num_clusters: int = 3
    slowness: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        at_least("num_replicas", self.num_replicas, 1)
        at_least("size", self.size, 1)
        at_least("num_clusters", self.num_clusters, 1, 6)
        one_of("method", self.method, get_args(Method))
        one_of("order", self.order, get_args(SampleOrder))
        one_of("schedule", self.schedule, get_args(ScheduleName))
        if self.memory_limit != math.inf:
            number("memory_limit", self.memory_limit, above=0.0)
        if self.method == "packing" and not self.row_lengths:
            raise ValueError('method="packing" needs row_lengths: the tokens of a row, such as (4096,)')
        if self.slowness and len(self.slowness) != self.num_replicas:
            raise ValueError(
                f"slowness={list(self.slowness)}: one row is needed for each of {self.num_replicas} replicas"
            )
        for factor in itertools.chain.from_iterable(self.slowness):
            number("slowness", factor, above=0.0)

    def slowness_DS(self, num_stages: int) -> Floats:
        """Return [D, S] χ of each stage of each replica.

        Raises:
            ValueError: where it was given for another number of stages.
        """
        if not self.slowness:
            return np.ones((self.num_replicas, num_stages))
        if any(len(row) != num_stages for row in self.slowness):
            raise ValueError(f"slowness={list(self.slowness)}: one number is needed for each of {num_stages} stages")
        return np.array(self.slowness)


class DoesNotFitError(ValueError):
    """Samples do not fit into the memory limit, whatever is computed again."""
