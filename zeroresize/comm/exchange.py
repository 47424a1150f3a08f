"""Small vectors of numbers, one a rank: exchanged while training goes on, or by all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.comm.cpu_group import CpuGroup, GatheredNumbers, NotAllCameError, PendingNumbers
from zeroresize.comm.meeting import gather, meet_by
from zeroresize.comm.whereabouts import Whereabouts, require_same_whereabouts

#: A wait that ends before this part of the time limit has not ended by it.
_EARLY = 0.9
_POSTED, _MET = 0, 1  # tags: the two kinds of exchange never wait for each other


class Exchange:
    """Numbers that the ranks of a group send each other, with each rank's whereabouts.

    Numbers are posted at one update and waited for at the next. They are waited for, never polled, so every rank sees
    the same table at the same update.

    Args:
        group: the ranks, on a CPU group of their own.
        counts_forwards: whether all ranks make equally many training forwards; replicas need not.

    Attributes:
        where: this rank's whereabouts, which the owner of the exchange keeps up to date.
        ranks: the ranks that take part, in the order of the group, counted over the whole world.
        waiting: the note of what a rank waits for, where that takes long.
        wait_warnings: warn of long waits for other ranks.
    """

    def __init__(self, group: CpuGroup, *, counts_forwards: bool = True) -> None:
        self._group, self._counts_forwards = group, counts_forwards
        self.where, self.ranks = group.where, group.ranks
        self.waiting, self.wait_warnings = group.waiting, group.wait_warnings
        self._posted: PendingNumbers | None = None
        self._posted_at = ""

    def post(self, numbers: Sequence[float]) -> None:
        """Send this rank's numbers; all ranks must send equally many.

        Raises:
            RuntimeError: if the numbers posted before have not been collected.
        """
        if self._posted is not None:
            raise RuntimeError("post() was called twice without collect() in between")
        self._posted = self._group.start_sending([*self.where.as_numbers(), *numbers], _POSTED)
        self._posted_at = str(self.where)

    def collect(self) -> list[list[float]] | None:
        """Wait for the numbers that every rank has posted, and return them in the order of the group; collective.

        Returns:
            A row of numbers for each rank; None if nothing was posted.

        Raises:
            RuntimeError: if not all ranks have posted within the time limit of their process group, or not at the same
                place.
        """
        if self._posted is None:
            return None
        posted, self._posted = self._posted, None  # cleared even if waiting fails, so a state can still be saved
        return self._received(posted, self._posted_at)

    def start_gathering(self, numbers: Sequence[float]) -> GatheredNumbers:
        """Start sending numbers to every rank that nobody waits for; equally many on all ranks, without whereabouts.

        What the ranks have started is matched in the order in which they did.
        """
        return self._group.start_gathering(numbers)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers at once, in the order of the group; a rank may have fewer than others.

        Collective.

        Raises:
            RuntimeError: if not all ranks come, or not from the same place.
        """
        return gather(numbers, self._exchange)

    def meet(self, *numbers: float) -> Sequence[Sequence[float]]:
        """Return the numbers of every rank, as a :data:`~zeroresize.comm.meeting.Meet` does; collective.

        Raises:
            RuntimeError: as :meth:`gather`.
        """
        return meet_by(self._exchange)(*numbers)

    def abort(self) -> None:
        """End what is under way, before :meth:`close`: leaving the group waits for it."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._posted = None
        self._group.close()

    def _exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        here = self._group.start_sending([*self.where.as_numbers(), *numbers], _MET)
        return self._received(here, str(self.where))

    def _announced(self) -> str:
        number = self.where.num_work_changes
        if not number:
            return ""
        times = "once" if number == 1 else f"{number} times"
        return f" (profile_next() or load_state_dict() was called {times} here: it must be on every rank)"

    def _received(self, under_way: PendingNumbers, started_at: str) -> list[list[float]]:
        """Every rank's numbers, without the whereabouts, which must be the same on all ranks.

        Raises:
            RuntimeError: if not all ranks have come, or not to the same place; the others can read why.
        """
        try:
            table = under_way.wait()
        except NotAllCameError as error:
            limit_s, missing, whose = self._group.time_limit.total_seconds(), error.ranks, self._group.whose
            in_job = [self._group.ranks[rank] for rank in missing]
            who = f"ranks {missing} of {whose} (ranks {in_job} of the job)"
            if error.waited_s < _EARLY * limit_s:
                after = f" after {error.waited_s:.0f} s" if error.waited_s >= 1.0 else ""
                why = (
                    f": a connection to {who} closed{after}, before the time limit of {limit_s:g} s. One of them may "
                    "have ended, failed before, or let go of its Balancer, as where the function that made it returned"
                )
            else:
                why = (
                    f" within {limit_s:g} s: exchanging the balancer's numbers with {who} failed: one of them may have "
                    f"died, failed before, made other calls{self._announced()}, or be busy, as with a checkpoint, for "
                    f"longer than the time limit of their process group, {limit_s:g} s (timeout=... where it is made)"
                )
            raise RuntimeError(
                f"ranks {missing} of {whose} did not come to {started_at}{why}"
                f"{self._group.reports.tell(f'ranks {missing} did not come')}"
            ) from error.__cause__
        num_of_place = Whereabouts.NUM_NUMBERS
        places = [Whereabouts.of_numbers(numbers[:num_of_place]) for numbers in table]
        self._group.reports.last_heard = places
        try:
            require_same_whereabouts(places, counts_forwards=self._counts_forwards)
        except RuntimeError as error:
            self._group.reports.tell(str(error), waits=False)
            raise
        self._group.reports.withdraw()
        return [numbers[num_of_place:] for numbers in table]
