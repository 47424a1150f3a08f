"""Scatter-gather (paper, Table I, where broadcast-reduce is compared with it): point to point, nothing is merged."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from zeroresize.migration.transport import LoanRoute, Pending, Transport


class ScatterGather(Transport):
    """Sends each receiver its part only; its results go back to the owner, which adds them up."""

    merges = False

    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        if self.rank == route.owner:
            assert slice_RL is not None
            for receiver in route.receivers:
                self._send_from_buffer(route, slice_RL[:, route.part_of(receiver)], receiver, name)
            return Pending(None)
        if self.rank not in route.receivers:
            return Pending(None)
        columns = route.part_of(self.rank)
        part = self.buffers.take(name, (num_rows, columns.stop - columns.start), like)
        return Pending(part, tuple(self._receive(route, part, route.owner)))

    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int, name: Hashable) -> Pending:
        if self.rank == route.owner:
            tensor = tensor.contiguous()
            works = [work for receiver in route.receivers for work in self._send(route, tensor, receiver)]
            return Pending(None, tuple(works))
        if self.rank not in route.receivers:
            return Pending(None)
        arriving = self.buffers.take(name, (len(tensor), num_columns), tensor)
        return Pending(arriving, tuple(self._receive(route, arriving, route.owner)))
