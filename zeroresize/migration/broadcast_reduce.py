"""Broadcast-reduce (paper, section IV-A): collectives over the whole group, merged with those that run anyway.

A single receiver's sum has one addend: it is sent and added, which is faster than a reduce under gloo.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from zeroresize.comm.collectives import NamedWork, start_broadcast, start_reduce
from zeroresize.migration.transport import LoanRoute, Pending, Transport


class BroadcastReduce(Transport):
    """Broadcasts the whole slice, of which a receiver uses its part; one reduce brings partial sums to the owner."""

    merges = True

    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        if self.rank == route.owner:
            assert slice_RL is not None
            return Pending(None, (self._broadcast(route, slice_RL),))
        # Ranks that only take part in the broadcast need the whole buffer, too.
        slice_RL = self.buffers.take(name, (num_rows, route.num_columns), like)
        work = self._broadcast(route, slice_RL)
        is_receiver = self.rank in route.receivers
        return Pending(slice_RL[:, route.part_of(self.rank)] if is_receiver else None, (work,))

    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int, name: Hashable) -> Pending:
        if self.rank == route.owner:
            return Pending(None, (self._broadcast(route, tensor.contiguous()),))
        arriving = self.buffers.take(name, (len(tensor), num_columns), tensor)
        return Pending(arriving, (self._broadcast(route, arriving),))

    def expect_addends(self, route: LoanRoute, shape: tuple[int, ...], like: Tensor, name: Hashable) -> list[Pending]:
        return [] if self._reduces(route) else super().expect_addends(route, shape, like, name)

    def add_up(self, route: LoanRoute, product: Tensor, expected: Sequence[Pending]) -> Pending:
        if self._reduces(route):
            return Pending(product, (self._reduce(route, product),))
        return super().add_up(route, product, expected)

    def takes_part_in_sum(self, route: LoanRoute) -> bool:
        return self._reduces(route) or super().takes_part_in_sum(route)

    def _start_giving(self, route: LoanRoute, partial: Tensor) -> list[NamedWork]:
        if not self._reduces(route):
            return super()._start_giving(route, partial)
        self._count(partial)
        return [self._reduce(route, partial)]

    @staticmethod
    def _reduces(route: LoanRoute) -> bool:
        return len(route.receivers) > 1

    def _reduce(self, route: LoanRoute, partial: Tensor) -> NamedWork:
        return start_reduce(partial, route.owner, self.process_group, route.layer)

    def _broadcast(self, route: LoanRoute, tensor: Tensor) -> NamedWork:
        if self.rank != route.owner:
            self._count(tensor)
        return start_broadcast(tensor, route.owner, self.process_group, route.layer, self.over)
