"""What a rank tells beside its times: where it waits most, and the state of its GPU; as numbers that ranks exchange."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: So many places travel, of names of 24 bytes: name, first rank, number of ranks, seconds. Before them the GPU's state.
MOST_PLACES = 3
_FORMAT = struct.Struct("=i2d" + MOST_PLACES * "24s2id")
#: Of :meth:`Surroundings.as_numbers`.
NUM_NUMBERS = _FORMAT.size // struct.calcsize("i")
#: Why a GPU is slower than it could be; the first stands for nothing that it tells.
_REASONS = ("", "heat", "power")


@dataclass(frozen=True)
class Place:
    """Describe where a rank waits: in the collectives of a group, or for another rank.

    Attributes:
        name: of the group, which others of its kind may share, or of the rank; empty where that is not known.
        first: the first rank of the group, over the whole job.
        size: how many ranks the group has; 0 where it is none.
    """

    name: str
    first: int = -1
    size: int = 0

    def __str__(self) -> str:
        return f"collectives of {self.name}" if self.size else self.name or "collectives"


@dataclass(frozen=True)
class GpuState:
    """Describe a GPU: what throttles it ("heat", "power" or ""), its temperature, its clock as a share of the most."""

    throttled: str
    celsius: float
    clock: float


@dataclass(frozen=True)
class Surroundings:
    """Describe what a rank tells beside its times: usual seconds of a step by where it waits most, and its GPU."""

    waits_s: Mapping[Place, float] = field(default_factory=dict)
    gpu: GpuState | None = None

    def as_numbers(self) -> list[float]:
        """Return equally many numbers for any surroundings; the places are those of the longest waits."""
        gpu = self.gpu or GpuState("", math.nan, math.nan)
        longest = sorted(self.waits_s.items(), key=lambda item: -item[1])[:MOST_PLACES]
        longest += [(Place(""), 0.0)] * (MOST_PLACES - len(longest))
        places = [part for place, s in longest for part in (place.name.encode(), place.first, place.size, s)]
        packed = _FORMAT.pack(_REASONS.index(gpu.throttled), gpu.celsius, gpu.clock, *places)
        return [float(number) for number in np.frombuffer(packed, np.int32)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Surroundings:
        """Return the surroundings that :meth:`as_numbers` has told."""
        reason, celsius, clock, *rest = _FORMAT.unpack(np.array(numbers, np.int32).tobytes())
        places = {}
        for name, first, size, seconds in zip(*[iter(rest)] * (len(rest) // MOST_PLACES), strict=True):
            if seconds > 0.0:
                places[Place(name.rstrip(b"\0").decode(errors="ignore"), first, size)] = seconds
        gpu = None if math.isnan(celsius) else GpuState(_REASONS[reason], celsius, clock)
        return cls(places, gpu)
