"""Broadcast-reduce (paper, section IV-A): collectives over the whole group, merged with those that run anyway.

Where there is a single receiver, its sum is one addend: it is sent and added, which gloo does faster than a reduce.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor

from zeroresize.migration.carrier import Carrier, Pending, Route


class BroadcastReduce(Carrier):
    """Every rank gets the whole slice, a receiver uses its part; partial sums come back by one reduce."""

    merges = True

    def send_slice(self, route: Route, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable) -> Pending:
        if self.rank == route.owner:
            assert slice_RL is not None
            return Pending(None, (self._broadcast(slice_RL, route.owner),))
        slice_RL = self.buffers.take(name, (num_rows, route.num_columns), like)  # also where only passed on to others
        work = self._broadcast(slice_RL, route.owner)
        is_receiver = self.rank in route.receivers
        return Pending(slice_RL[:, route.part_of(self.rank)] if is_receiver else None, (work,))

    def send_whole(self, route: Route, tensor: Tensor, name: Hashable) -> Pending:
        if self.rank == route.owner:
            return Pending(None, (self._broadcast(tensor.contiguous(), route.owner),))
        arriving = self.buffers.take(name, tuple(tensor.shape), tensor)
        return Pending(arriving, (self._broadcast(arriving, route.owner),))

    def takes_part_in_sum(self, route: Route) -> bool:
        return len(route.receivers) > 1 or super().takes_part_in_sum(route)

    def send_sum(self, route: Route, partial: Tensor, name: Hashable) -> Pending:
        if len(route.receivers) == 1:
            if self.rank == route.owner:
                return self._receive_addends(route, partial, name)
            return Pending(partial, tuple(self._send(partial, route.owner)))
        if self.rank != route.owner:
            self.traffic.count(partial)
        root = dist.get_global_rank(self.process_group, route.owner)
        work = dist.reduce(partial, root, group=self.process_group, async_op=True)
        return Pending(partial, (work,))

    def _broadcast(self, tensor: Tensor, owner: int) -> dist.Work:
        if self.rank != owner:
            self.traffic.count(tensor)
        root = dist.get_global_rank(self.process_group, owner)
        return dist.broadcast(tensor, root, group=self.process_group, async_op=True)
