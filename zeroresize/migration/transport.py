"""How slices travel between the rank that owns them and the ranks that compute them, by two transports.

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

from zeroresize.comm.collectives import (
    Channel,
    NamedWork,
    group_rank,
    start_broadcast,
    start_receive,
    start_reduce,
    start_send,
)

#: Every part but the last is a multiple of so many columns, where the slice is long enough.
_UNIT = 8
_FEWEST_UNITS = 20


def bounds_of_parts(num_columns: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Return where the parts of a slice begin and end: part i is columns ``bounds[i]`` to ``bounds[i + 1]`` of it.

    Which columns each receiver computes (paper, section IV-A), for parts of any size.
    """
    unit = _UNIT if num_columns >= _UNIT * _FEWEST_UNITS * len(parts) else 1
    ends = [min(unit * round(num_columns * end / unit), num_columns) for end in itertools.accumulate(parts)]
    return (0, *ends[:-1], num_columns)


@dataclass(frozen=True)
class LoanRoute:
    """Describes from which rank to which others a slice of columns travels."""

    owner: int  # whose columns, within the group
    receivers: tuple[int, ...]  # who computes them, in the order of the parts
    bounds: tuple[int, ...]  # part i is columns ``bounds[i]`` to ``bounds[i + 1]`` of the slice
    layer: str | None = None  # name of the layer, for errors; None leaves it out

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
    """Holds a tensor whose transfer is under way: what arrives, or what is sent."""

    tensor: Tensor | None
    works: tuple[NamedWork, ...] = ()
    finish: Callable[[], Tensor] | None = None

    def wait(self) -> Tensor | None:
        """Return the tensor, once it has arrived."""
        for work in self.works:
            work.wait()
        return self.tensor if self.finish is None else self.finish()


class Transport(ABC):
    """Defines one way of migrating.

    Args:
        process_group: the tensor-parallel group.
        over: carries everything but sums; None for the group itself.

    Attributes:
        rank: this rank within the group.
        bytes_moved: so far; each transfer is counted once in the group, by the rank that receives it or adds to it.
        merges: whether a receiver's addend to a sum over the group goes into the collective that runs anyway.
    """

    merges: bool

    def __init__(self, process_group: ProcessGroup, over: Channel | None = None) -> None:
        self.process_group, self.rank, self.over = process_group, group_rank(process_group), over
        self.bytes_moved = 0
        self._sending: dict[Hashable, Pending] = {}

    @abstractmethod
    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        """Send the owner's packed columns [rows, L]; a receiver gets its part [rows, m_i], other ranks None.

        Args:
            slice_RL: on the owner, contiguous; it must not change until the pending transfer has been waited for.
            like: has the dtype and device of what is sent.
            name: of what is sent: it waits for what was last sent by this name.
        """

    @abstractmethod
    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int) -> Pending:
        """Send the owner's ``tensor`` [rows, num_columns] to every receiver.

        Other ranks pass one of as many rows and of the same dtype and device.
        """

    def expect_addends(self, route: LoanRoute, shape: tuple[int, ...], like: Tensor) -> list[Pending]:
        """Expect the addends, which arrive one by one: on the owner of a sum, before its own part is computed."""
        return [self._receive(route, shape, like, receiver) for receiver in route.receivers]

    def add_up(self, route: LoanRoute, product: Tensor, expected: Sequence[Pending]) -> Pending:
        """Add all addends to ``product``, in place, once the result is waited for: on the owner of a sum."""

        def add() -> Tensor:
            for pending in expected:
                addend = pending.wait()
                assert addend is not None
                product.add_(addend)
            return product

        return Pending(product, finish=add)

    def takes_part_in_sum(self, route: LoanRoute) -> bool:
        """Tell whether this rank must call :meth:`add_up` or :meth:`give`, with zeros if it computed nothing."""
        return self.rank == route.owner or self.rank in route.receivers

    def give(self, route: LoanRoute, partial: Tensor, name: Hashable) -> None:
        """Send this rank's addend, which must not change any more: on the other ranks of a sum."""
        self._hold((name, "given"), partial, self._start_giving(route, partial))

    def _start_giving(self, route: LoanRoute, partial: Tensor) -> list[NamedWork]:
        return self._send(route, partial, route.owner)

    def return_slice(
        self, route: LoanRoute, part_Rm: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        """Send the receivers' parts [rows, m_i] to the owner, which gets [rows, L]; other ranks get None.

        The parts are disjoint, so nothing is summed; they must not change any more.
        """
        if self.rank == route.owner:
            parts = [self._receive_part(route, num_rows, like, receiver) for receiver in route.receivers]
            if len(parts) == 1:
                return parts[0]
            return Pending(None, finish=lambda: torch.cat([_arrived(part) for part in parts], dim=1))
        if self.rank in route.receivers:
            assert part_Rm is not None
            self._send_and_hold(route, part_Rm, route.owner, name)
        return Pending(None)

    def finish_sending(self) -> None:
        """Wait until all that was sent has left; what failed is not waited for again."""
        sending, self._sending = self._sending, {}
        for pending in sending.values():
            pending.wait()

    @property
    def bytes_held(self) -> int:
        """Memory of what is being sent."""
        held = [pending.tensor for pending in self._sending.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def _hold(self, name: Hashable, tensor: Tensor, works: Sequence[NamedWork]) -> None:
        """Keep ``tensor`` alive until it is sent, after waiting for what this name held before."""
        before = self._sending.pop(name, None)
        if before is not None:
            before.wait()
        self._sending[name] = Pending(tensor, tuple(works))

    def _count(self, tensor: Tensor) -> None:
        self.bytes_moved += tensor.numel() * tensor.element_size()

    def _receive(self, route: LoanRoute, shape: tuple[int, ...], like: Tensor, sender: int) -> Pending:
        arriving = _empty(shape, like)
        self._count(arriving)
        return Pending(arriving, tuple(start_receive(arriving, sender, self.process_group, route.layer, self.over)))

    def _receive_part(self, route: LoanRoute, num_rows: int, like: Tensor, receiver: int) -> Pending:
        columns = route.part_of(receiver)
        sender = receiver if self.rank == route.owner else route.owner
        return self._receive(route, (num_rows, columns.stop - columns.start), like, sender)

    def _send(self, route: LoanRoute, tensor: Tensor, receiver: int) -> list[NamedWork]:
        return start_send(tensor, receiver, self.process_group, route.layer, self.over)

    def _send_and_hold(self, route: LoanRoute, tensor: Tensor, receiver: int, name: Hashable) -> None:
        tensor = tensor.contiguous()
        self._hold((name, receiver), tensor, self._send(route, tensor, receiver))


class BroadcastReduce(Transport):
    """Sends by collectives over the whole group, merged with those that run anyway (paper, section IV-A).

    It broadcasts the whole slice, of which a receiver uses its part; one reduce brings partial sums to the owner. A
    single receiver's sum has one addend: it is sent and added, which is faster than a reduce under gloo.
    """

    merges = True

    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        if self.rank == route.owner:
            assert slice_RL is not None
            return Pending(None, (self._broadcast(route, slice_RL),))
        # Ranks that only take part in the broadcast need the whole memory, too.
        slice_RL = _empty((num_rows, route.num_columns), like)
        work = self._broadcast(route, slice_RL)
        return Pending(slice_RL[:, route.part_of(self.rank)] if self.rank in route.receivers else None, (work,))

    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int) -> Pending:
        if self.rank == route.owner:
            return Pending(None, (self._broadcast(route, tensor.contiguous()),))
        arriving = _empty((len(tensor), num_columns), tensor)
        return Pending(arriving, (self._broadcast(route, arriving),))

    def expect_addends(self, route: LoanRoute, shape: tuple[int, ...], like: Tensor) -> list[Pending]:
        return [] if self._reduces(route) else super().expect_addends(route, shape, like)

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


class ScatterGather(Transport):
    """Sends each receiver its part only; its results go back to the owner, which adds them up (paper, Table I)."""

    merges = False

    def send_slice(
        self, route: LoanRoute, slice_RL: Tensor | None, num_rows: int, like: Tensor, name: Hashable
    ) -> Pending:
        if self.rank == route.owner:
            assert slice_RL is not None
            for receiver in route.receivers:
                self._send_and_hold(route, slice_RL[:, route.part_of(receiver)], receiver, name)
        return self._receive_part(route, num_rows, like, self.rank) if self.rank in route.receivers else Pending(None)

    def send_whole(self, route: LoanRoute, tensor: Tensor, num_columns: int) -> Pending:
        if self.rank == route.owner:
            tensor = tensor.contiguous()
            return Pending(None, tuple(work for other in route.receivers for work in self._send(route, tensor, other)))
        if self.rank not in route.receivers:
            return Pending(None)
        return self._receive(route, (len(tensor), num_columns), tensor, route.owner)


_TRANSPORTS: dict[str, type[Transport]] = {"broadcast-reduce": BroadcastReduce, "scatter-gather": ScatterGather}


def make_transport(migration_transport: str, process_group: ProcessGroup, over: Channel | None = None) -> Transport:
    """Make the transport that the configuration names, ``over`` the group itself or another channel."""
    return _TRANSPORTS[migration_transport](process_group, over)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    with torch.inference_mode(False):  # it may outlive the forward that asks first
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _arrived(part: Pending) -> Tensor:
    tensor = part.wait()
    assert tensor is not None
    return tensor
