"""The plan of one iteration: micro-batches, what each stage does with them, and what that is expected to take.

``D`` replicas, ``S`` stages, ``M`` micro-batches of a replica.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroresize.policy.microbatches.micro_batch import MicroBatch
from zeroresize.runtime.instructions import Instruction, Kind

_KINDS = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FORMAT = 1


@dataclass(frozen=True)
class ReplicaPlan:
    """Describe what one replica does.

    Attributes:
        microbatches: [M], by the numbers that instructions use; there may be none.
        stages: [S] instructions.
        expected_s: seconds from its first forward to its last backward.
        expected_bytes: [S] of activations and workspace at most.
    """

    microbatches: tuple[MicroBatch, ...]
    stages: tuple[tuple[Instruction, ...], ...]
    expected_s: float
    expected_bytes: tuple[float, ...]


@dataclass(frozen=True)
class IterationPlan:
    """Describe what all replicas do.

    Attributes:
        iteration: its number.
        model: a fingerprint of the model, its stages and costs, and of the options of planning; ranks carry out plans
            of their own only.
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
                "microbatches": [[list(map(list, each.rows)), list(each.lengths)] for each in replica.microbatches],
                "stages": [[[_NUMBERS[kind], number] for kind, number in stage] for stage in replica.stages],
                "expected_s": replica.expected_s,
                "expected_bytes": list(replica.expected_bytes),
            }
            for replica in self.replicas
        ]
        head = {"format": _FORMAT, "iteration": self.iteration, "model": self.model, "batch": self.batch}
        return json.dumps({**head, "recomputation": self.recomputation, "replicas": replicas})

    @classmethod
    def from_json(cls, text: str) -> IterationPlan:
        """Return the plan that :meth:`to_json` described.

        Raises:
            ValueError: for anything else.
        """
        try:
            value: dict[str, Any] = json.loads(text)
            if value["format"] != _FORMAT:
                raise ValueError(f"a plan of format {value['format']} cannot be read: wanted is {_FORMAT}")
            return cls(
                int(value["iteration"]),
                str(value["model"]),
                str(value["batch"]),
                str(value["recomputation"]),
                tuple(_replica(replica) for replica in value["replicas"]),
            )
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no plan of an iteration: {error!r}") from error


def _replica(value: dict[str, Any]) -> ReplicaPlan:
    return ReplicaPlan(
        tuple(MicroBatch(tuple(map(tuple, rows)), tuple(lengths)) for rows, lengths in value["microbatches"]),
        tuple(_instructions(stage) for stage in value["stages"]),
        float(value["expected_s"]),
        tuple(map(float, value["expected_bytes"])),
    )


def _instructions(values: Sequence[Sequence[int]]) -> tuple[Instruction, ...]:
    return tuple(Instruction(_KINDS[kind], microbatch) for kind, microbatch in values)
