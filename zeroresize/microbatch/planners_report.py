"""What the planners of a host say of themselves, so that who waits for a plan knows why it does not come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlannersReport:
    """Describe what the planners of one host do.

    Attributes:
        host: the number of the host.
        num_hosts: how many hosts share the iterations: this one plans those whose number is ``host`` modulo it.
        first, last: the iterations that are planned at all; None for no last one.
        num_workers: how many processes plan.
        beat: a number that rises as long as they live.
        under_way: the iterations that are being planned, with the seconds since each began.
        error: what keeps them from planning at all; None for nothing.
        has_ended: whether they plan no more.
    """

    host: int
    num_hosts: int
    first: int
    last: int | None
    num_workers: int
    beat: int = 0
    under_way: Mapping[int, float] = field(default_factory=dict)
    error: str | None = None
    has_ended: bool = False

    def plans(self, iteration: int) -> bool:
        """Return whether this iteration is this host's to plan."""
        return iteration >= self.first and iteration % self.num_hosts == self.host and not self.is_beyond(iteration)

    def is_beyond(self, iteration: int) -> bool:
        """Return whether no host plans this iteration, since it comes after the last."""
        return self.last is not None and iteration > self.last

    def to_json(self) -> str:
        """Return text that :meth:`from_json` reads back."""
        return json.dumps({**vars(self), "under_way": list(self.under_way.items())})

    @classmethod
    def from_json(cls, text: str) -> PlannersReport:
        """Return the report that :meth:`to_json` described."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "under_way": dict(values["under_way"])})

    def __str__(self) -> str:
        """What they do, in words."""
        if self.error is not None:
            return f"the planners of host {self.host} cannot plan: {self.error}"
        if self.has_ended:
            return f"the planners of host {self.host} have ended"
        doing = ", ".join(f"iteration {iteration} for {seconds:.1f} s" for iteration, seconds in self.under_way.items())
        return f"the planners of host {self.host} ({self.num_workers}) plan {doing or 'nothing'}"
