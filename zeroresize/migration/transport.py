"""How slices travel between the rank that owns them and the ranks that compute them.

``L`` columns are migrated; receiver i computes ``m_i`` of them. Every rank of the group makes the same calls in the
same order, whatever its role, and waits only when it needs a result.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, NamedWork, start_receive, start_send
from zeroresize.migration.buffers import Buffers

#: Every part but the last is a multiple of so many columns, where the slice is long enough.
_UNIT = 8
_FEWEST_UNITS = 20


def bounds_of_parts(num_columns: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Return where the parts of a slice begin and end: part i is columns ``bounds[i]`` to ``bounds[i + 1]`` of it.

    Which columns each receiver computes (paper, section IV-A), for parts of any size.

    Args:
        num_columns: of the migrated slice, L_mig.
        parts: share of it that each receiver computes; they sum to 1. Equal parts are the paper's
            m = L_mig / (e − x), but need not divide evenly.
    """
    unit = _UNIT if num_columns >= _UNIT * _FEWEST_UNITS * len(parts) else 1
    ends = [min(unit * round(num_columns * end / unit), num_columns) for end in itertools.accumulate(parts)]
    return (0, *ends[:-1], num_columns)


@dataclass(frozen=True)
class LoanRoute:
    """Describes from which rank to which others a slice of columns travels.

    Attributes:
        owner: whose columns, within the group.
        receivers: who computes them, in the order of the parts.
        bounds: part i is columns ``bounds[i]`` to ``bounds[i + 1]`` of the slice.
        layer: name of the layer, for errors; None leaves it out.
    """

    owner: int
    receivers: tuple[int, ...]
    bounds: tuple[int, ...]
    layer: str | None = None

    @classmethod
    def of_parts(
        cls, owner: int, receivers: Sequence[int], bounds: Sequence[int], layer: str | None = None
    ) -> LoanRoute:
        """Make a route without the receivers whose part is empty."""
        of_all = zip(receivers, itertools.pairwise(bounds), strict=True)
        parts = [(receiver, end) for receiver, (begin, end) in of_all if end > begin]
        return cls(owner, tuple(receiver for receiver, _ in parts), (0, *(end for _, end in parts)), layer)

    @property
    def num_columns(self) -> int:
        """L, the columns of the slice."""
        return self.bounds[-1]

    def part_of(self, receiver: int) -> slice:
        """Return which columns of the slice ``receiver`` computes."""
        place = self.receivers.index(receiver)
        return slice(self.bounds[place], self.bounds[place + 1])


@dataclass(frozen=True)
class Pending:
    """Holds a tensor whose transfer is under way."""

    tensor: Tensor | None
    works: tuple[NamedWork, ...] = ()
    finish: Callable[[], None] | None = None

    def wait(self) -> Tensor | None:
        """Return the tensor, once it has arrived."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
        return self.tensor


class Transport(ABC):
    """Defines one way of migrating.

    Args:
        process_group: the tensor-parallel group.
        rank: this rank within it.
        buffers: where what arrives is put.
        over: carries everything but sums; None for the group itself.

    Attributes:
        bytes_moved: so far; each transfer is counted once in the group, by the rank that receives it or adds to it.
        merges: whether a receiver's addend to a sum over the group goes into the collective that runs anyway.
    """

    merges: bool

    def __init__(self, process_group: ProcessGroup, rank: int, buffers: Buffers, over: Channel | None = None) -> None:
        self.process_group, self.rank, self.buffers, self.over = process_group, rank, buffers, over
        self.bytes_moved = 0

    @abstractmethod
    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        """Send the owner's packed columns [rows, L]; a receiver gets its part [rows, m_i], other ranks None.

        Args:
            slice_RL: on the owner, contiguous; it must not change until the pending transfer has been waited for.
            like: has the dtype and device of what is sent.
            name: of the buffer that receives it.
        """

    @abstractmethod
    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int, name: Hashable) -> Pending:
        """Send the owner's ``tensor`` [rows, num_columns] to every receiver.

        Other ranks pass one of as many rows and of the same dtype and device.
        """

    def expect_addends(self, route: LoanRoute, shape: tuple[int, ...], like: Tensor, name: Hashable) -> list[Pending]:
        """Expect the addends, which arrive one by one: on the owner of a sum, before its own part is computed."""
        expected = []
        for receiver in route.receivers:
            addend = self.buffers.take((*_key(name), receiver), shape, like)
            expected.append(Pending(addend, tuple(self._receive(route, addend, receiver))))
        return expected

    def add_up(self, route: LoanRoute, product: Tensor, expected: Sequence[Pending]) -> Pending:
        """Add all addends to ``product``, in place, once the result is waited for: on the owner of a sum."""

        def add() -> None:
            for pending in expected:
                addend = pending.wait()
                assert addend is not None
                product.add_(addend)

        return Pending(product, finish=add)

    def takes_part_in_sum(self, route: LoanRoute) -> bool:
        """Tell whether this rank must call :meth:`add_up` or :meth:`give`, with zeros if it computed nothing."""
        return self.rank == route.owner or self.rank in route.receivers

    def give(self, route: LoanRoute, partial: Tensor, name: Hashable) -> None:
        """Send this rank's addend, which must not change any more: on the other ranks of a sum."""
        self.buffers.hold((*_key(name), "given"), partial, self._start_giving(route, partial))

    def _start_giving(self, route: LoanRoute, partial: Tensor) -> list[NamedWork]:
        return self._send(route, partial, route.owner)

    def return_slice(
        self, route: LoanRoute, part_Rm: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        """Send the receivers' parts [rows, m_i] to the owner, which gets [rows, L]; other ranks get None.

        The parts are disjoint, so nothing is summed.
        """
        if self.rank == route.owner:
            parts = []
            works = []
            for receiver in route.receivers:
                columns = route.part_of(receiver)
                part = self.buffers.take((*_key(name), receiver), (num_rows, columns.stop - columns.start), like)
                works += self._receive(route, part, receiver)
                parts.append(part)
            if len(parts) == 1:
                return Pending(parts[0], tuple(works))
            whole = self.buffers.take((*_key(name), "whole"), (num_rows, route.num_columns), like)
            return Pending(whole, tuple(works), lambda: _side_by_side(parts, whole))
        if self.rank in route.receivers:
            assert part_Rm is not None
            self._send_from_buffer(route, part_Rm, route.owner, name)
        return Pending(None)

    def _count(self, tensor: Tensor) -> None:
        self.bytes_moved += tensor.numel() * tensor.element_size()

    def _receive(self, route: LoanRoute, tensor: Tensor, sender: int) -> list[NamedWork]:
        self._count(tensor)
        return start_receive(tensor, sender, self.process_group, route.layer, self.over)

    def _send(self, route: LoanRoute, tensor: Tensor, receiver: int) -> list[NamedWork]:
        return start_send(tensor, receiver, self.process_group, route.layer, self.over)

    def _send_from_buffer(self, route: LoanRoute, tensor: Tensor, receiver: int, name: Hashable) -> None:
        """Send a copy, so the caller may change its tensor at once."""
        copy = self.buffers.take((*_key(name), "to", receiver), tuple(tensor.shape), tensor)
        copy.copy_(tensor)
        for work in self._send(route, copy, receiver):
            self.buffers.is_being_sent(copy, work)


def _key(name: Hashable) -> tuple[Hashable, ...]:
    return name if isinstance(name, tuple) else (name,)


def _side_by_side(parts: list[Tensor], whole: Tensor) -> None:
    torch.cat(parts, dim=1, out=whole)
