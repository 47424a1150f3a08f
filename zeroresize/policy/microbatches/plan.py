"""What the plan of an iteration is: micro-batches, what each stage does with them; and how plans are asked for.

A sample has one length in a decoder-only model, its tokens, and two in an encoder-decoder model, those of its source
and of its target. ``A`` is that number of lengths, ``N`` the samples of a mini-batch, ``D`` replicas, ``S`` stages,
``M`` micro-batches of a replica.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.hashing import digest
from zeroresize.utils.value_checks import number

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
#: "dynamic": by dynamic programming; the others are there for comparison.
Method = Literal["dynamic", "packing", "fixed", "tokens"]
SampleOrder = Literal["sorted", "tour"]
#: "adaptive": memory-aware cyclic scheduling, or 1F1B where that is shorter and fits.
ScheduleName = Literal["1f1b", "adaptive"]

_KINDS = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FORMAT = 1


#: Of micro-batches, whose order is chosen; of twice as many there are 720 orders.
NUM_CLUSTERS = 3


class DoesNotFitError(ValueError):
    """Samples do not fit into the memory limit, whatever is computed again."""


@checked(
    num_replicas=integer(1),
    memory_limit=real(above=0.0),
    size=integer(1),
    row_lengths=integer(1),
    num_clusters=integer(1, most=2 * NUM_CLUSTERS),
)
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
        num_clusters: of micro-batches, whose order is chosen, up to 6; 1 leaves the order as it is.
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
    num_clusters: int = NUM_CLUSTERS
    slowness: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.method == "packing" and not self.row_lengths:
            raise ValueError('method="packing" needs row_lengths: the tokens of a row, such as (4096,)')
        if self.slowness and len(self.slowness) != self.num_replicas:
            raise ValueError(
                f"slowness={list(self.slowness)}: one row is needed for each of {self.num_replicas} replicas"
            )
        for factor in itertools.chain.from_iterable(self.slowness):
            number("slowness", factor, above=0.0)

    def slowness_DS(self, num_stages: int) -> Floats:
        """Return [D, S] χ of each stage of each replica; ValueError where it is of another number of stages."""
        if not self.slowness:
            return np.ones((self.num_replicas, num_stages))
        if any(len(row) != num_stages for row in self.slowness):
            raise ValueError(f"slowness={list(self.slowness)}: one number is needed for each of {num_stages} stages")
        return np.array(self.slowness)


@dataclass(frozen=True)
class MicroBatch:
    """Describe some rows that are computed as one.

    Attributes:
        rows: the numbers of the samples in each; several in a row are packed one behind another.
        lengths: [A] tokens of each row with padding.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, samples: Sequence[int] | Indices, lengths_NA: Indices) -> MicroBatch:
        """Return these samples, one in a row, padded to the longest of them; ValueError for none."""
        if not len(samples):
            raise ValueError("a micro-batch of no samples is empty: at least one is needed")
        longest = lengths_NA[np.asarray(samples)].max(axis=0)
        return cls(tuple((int(sample),) for sample in samples), tuple(longest.tolist()))

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the numbers of all samples."""
        return tuple(itertools.chain.from_iterable(self.rows))

    @property
    def size(self) -> int:
        """Return how many rows there are."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that are computed, padding included."""
        return self.size * sum(self.lengths)


def shapes_of(microbatches: Sequence[MicroBatch]) -> tuple[Indices, Indices]:
    """Return [M] sizes and [M, A] lengths."""
    sizes = np.array([each.size for each in microbatches], dtype=np.int64)
    return sizes, np.array([each.lengths for each in microbatches], dtype=np.int64)


def whole_lengths(lengths_NA: Any) -> Indices:
    """Return the lengths of samples as they are, if they are whole numbers of at least one sample; else ValueError."""
    lengths = np.asarray(lengths_NA)
    if lengths.ndim != 2 or not lengths.size or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths of shape {lengths.shape} and type {lengths.dtype} are not allowed: whole numbers of "
            "[samples, 1 or 2] are needed, with a sample"
        )
    return lengths.astype(np.int64)


def batch_fingerprint(lengths_NA: Indices) -> str:
    """Return a digest of the samples' lengths in their order."""
    lengths = np.ascontiguousarray(whole_lengths(lengths_NA), dtype="<i8")
    return digest(repr(lengths.shape), lengths.tobytes()).hex()


@dataclass(frozen=True)
class ReplicaPlan:
    """Describe what one replica does."""

    microbatches: tuple[MicroBatch, ...]  # [M], by the numbers that instructions use; there may be none
    stages: tuple[tuple[Instruction, ...], ...]  # [S] instructions
    expected_s: float  # seconds from its first forward to its last backward
    expected_bytes: tuple[float, ...]  # [S] of activations and workspace at most


@dataclass(frozen=True)
class IterationPlan:
    """Describe what all replicas do.

    Attributes:
        iteration: its number.
        model: a fingerprint of costs, stages and options of planning; ranks carry out plans of their own only.
        batch: a fingerprint of the samples' lengths in their order.
        recomputation: what is computed again in backwards.
        replicas: [D].
    """

    iteration: int
    model: str
    batch: str
    recomputation: str
    replicas: tuple[ReplicaPlan, ...]

    @property
    def expected_s(self) -> float:
        """Return the seconds of the slowest replica."""
        return max(replica.expected_s for replica in self.replicas)

    def to_json(self) -> str:
        """Return text that :meth:`from_json` reads back."""
        replicas = [
            {
                "microbatches": [[each.rows, each.lengths] for each in replica.microbatches],
                "stages": [[[_NUMBERS[kind], number] for kind, number in stage] for stage in replica.stages],
                "expected_s": replica.expected_s,
                "expected_bytes": replica.expected_bytes,
            }
            for replica in self.replicas
        ]
        head = {"format": _FORMAT, "iteration": self.iteration, "model": self.model, "batch": self.batch}
        return json.dumps({**head, "recomputation": self.recomputation, "replicas": replicas})

    @classmethod
    def from_json(cls, text: str) -> IterationPlan:
        """Return the plan that :meth:`to_json` described; ValueError for anything else."""
        try:
            value: dict[str, Any] = json.loads(text)
            if value["format"] != _FORMAT:
                raise ValueError(f"a plan of format {value['format']} cannot be read: wanted is {_FORMAT}")
            head = str(value["model"]), str(value["batch"]), str(value["recomputation"])
            return cls(int(value["iteration"]), *head, tuple(map(_replica, value["replicas"])))
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no plan of an iteration: {error!r}") from error


def _replica(value: dict[str, Any]) -> ReplicaPlan:
    return ReplicaPlan(
        tuple(MicroBatch(tuple(map(tuple, rows)), tuple(lengths)) for rows, lengths in value["microbatches"]),
        tuple(tuple(Instruction(_KINDS[kind], number) for kind, number in stage) for stage in value["stages"]),
        float(value["expected_s"]),
        tuple(map(float, value["expected_bytes"])),
    )
