"""What a rank tells beside its times: where it waits most, and the state of its GPU; as numbers that ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: So many places travel, of names of so many bytes, six in a number.
MOST_PLACES, _NAME_BYTES = 3, 18
#: Why a GPU is slower than it could be; the first stands for nothing that it tells.
_REASONS = ("", "heat", "power")


@dataclass(frozen=True)
class Place:
    """Describe where a rank waits: in the collectives of a group, or for another rank.

    Attributes:
        label: the group: its name, or its ranks.
        first: the first rank of the group, over the whole job; -1 where nothing is known of it.
        peer: the rank that is waited for, over the whole job; None in a collective.
    """

    label: str
    first: int = -1
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is not None:
            return f"rank {self.peer} of the job"
        return f"collectives of {self.label}" if self.label else "collectives"


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
        numbers = [float(_REASONS.index(gpu.throttled)), gpu.celsius, gpu.clock]
        longest = sorted(self.waits_s.items(), key=lambda item: -item[1])[:MOST_PLACES]
        for place, seconds in longest:
            name = place.label.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
            numbers += [float(int.from_bytes(name[at : at + 6], "big")) for at in range(0, _NAME_BYTES, 6)]
            numbers += [float(place.first), -1.0 if place.peer is None else float(place.peer), seconds]
        return numbers + [0.0] * (NUM_NUMBERS - len(numbers))

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Surroundings:
        """Return the surroundings that :meth:`as_numbers` has told."""
        reason, celsius, clock, *rest = numbers
        waits_s = {}
        for *name, first, peer, seconds in (rest[at : at + 6] for at in range(0, len(rest), 6)):
            if seconds > 0.0:
                label = b"".join(int(part).to_bytes(6, "big") for part in name).decode(errors="ignore").strip()
                waits_s[Place(label, int(first), None if peer < 0.0 else int(peer))] = seconds
        gpu = None if math.isnan(celsius) else GpuState(_REASONS[int(reason)], celsius, clock)
        return cls(waits_s, gpu)


#: Of :meth:`Surroundings.as_numbers`.
NUM_NUMBERS = 3 + MOST_PLACES * (_NAME_BYTES // 6 + 3)
