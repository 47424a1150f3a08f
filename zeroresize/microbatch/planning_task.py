"""What the planners of a host plan: which iterations, how far ahead, and where they leave the plans."""

from __future__ import annotations

from dataclasses import dataclass

from zeroresize.utils.value_checks import at_least


@dataclass(frozen=True)
class PlanningTask:
    """Describe what the planners of one host plan.

    Attributes:
        address: of the instruction store.
        first, last: the iterations that are planned; None for no last one.
        num_workers: how many processes plan.
        ahead: how many iterations they are ahead of the one that is under way, at most.
        host, num_hosts: of this many hosts, it plans the iterations whose number is ``host`` modulo ``num_hosts``.

    Raises:
        ValueError: for numbers that are not allowed.
    """

    address: str
    first: int
    last: int | None
    num_workers: int
    ahead: int
    host: int
    num_hosts: int

    def __post_init__(self) -> None:
        at_least("first", self.first, 0)
        if self.last is not None:
            at_least("last", self.last, self.first)
        at_least("num_workers", self.num_workers, 1)
        at_least("ahead", self.ahead, 1)
        at_least("num_hosts", self.num_hosts, 1)
        at_least("host", self.host, 0, self.num_hosts - 1)

    def wanted(self, progress: int | None) -> range:
        """Return the iterations that this host may plan now.

        Args:
            progress: the iteration that executors have come to; None while they have not said.
        """
        begin = max(self.first, progress or 0)
        end = begin + self.ahead + 1
        if self.last is not None:
            end = min(end, self.last + 1)
        return range(begin + (self.host - begin) % self.num_hosts, end, self.num_hosts)
