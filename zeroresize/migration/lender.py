"""Carries out a plan's loans: which columns of which layer travel, and their weights once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import broadcast, group_rank, group_size, world_size
from zeroresize.comm.groups import WeightGroup
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import all_segments, shard_shape
from zeroresize.migration.gradient_return import GradientReturn
from zeroresize.migration.layer_loans import LayerLoan, LayerLoans
from zeroresize.migration.transport import LoanRoute, bounds_of_parts, make_transport
from zeroresize.plan.columns import Columns
from zeroresize.plan.group import Loan
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.policy.tensor.columns.order import num_lent

#: Loans, the epoch of their columns, and who owns which units of all segments: what is lent follows from these.
_InForce = tuple[tuple[Loan, ...], int, tuple[OwnershipMap, ...]]


class Lender:
    """Gives the layers of one rank their loans; making it is collective over the group.

    Args:
        layers: balanced layers by name, the same names in the same order on every rank.
        process_group: their tensor-parallel group.
        migration_transport: how slices travel, one of ``MIGRATION_TRANSPORTS``.
        is_forced: whether a loan keeps exactly to its ratio, instead of rounding to columns that multiply fast.
    """

    def __init__(
        self,
        layers: Mapping[str, BalancedLinear],
        process_group: ProcessGroup,
        migration_transport: str,
        *,
        is_forced: bool = True,
    ) -> None:
        self._layers, self._group, self._is_forced = layers, process_group, is_forced
        self._rank = group_rank(process_group)
        # Replicas lend differently, yet their gradients must come in one order: DDP fills buckets in order of arrival.
        self._has_replicas = world_size() > group_size(process_group)
        self._transport = make_transport(migration_transport, process_group)
        self._weight_group = WeightGroup(process_group, self._device)
        self._weight_transport = make_transport(migration_transport, process_group, self._weight_group)
        self._gradient_return = GradientReturn((self._transport, self._weight_transport))
        self._in_force: _InForce | None = None
        self._layer_loans: list[LayerLoans] = []

    def install(self, loans: Sequence[Loan], lent: Mapping[str, Tensor], epoch: int = 0) -> None:
        """Put ``loans`` in force; collective over the group if they are new.

        :meth:`send_weights` sends the weights of new loans, or the first training forward that needs one does. Until
        then they may change. A layer of which the owner has no row or lends no column is left out, on every rank.

        Args:
            loans: the same on every rank.
            lent: if this rank is an owner, its lent columns of every layer, int64, in the order in which they are
                divided among the receivers: as many as the loan's share is of the columns that this rank has now.
            epoch: of the columns that ``lent`` names, the same on every rank; the same loans in another one are new,
                and so they are once units have moved.
        """
        if not (loans or self._has_replicas):
            self.take_back()
            return
        if self._key(loans, epoch) == self._in_force:
            return
        self.take_back()
        self._in_force = self._key(loans, epoch)
        by_layer: dict[str, list[LayerLoan]] = {name: [] for name in self._layers}
        for loan in loans:
            shapes = self._lent_shapes(loan)
            for name, columns in self._tell_columns(loan, lent, shapes).items():
                num_rows, num_columns = shapes[name]
                route = LoanRoute.of_parts(loan.owner, loan.receivers, bounds_of_parts(num_columns, loan.parts), name)
                by_layer[name].append(LayerLoan(route, Columns.at(self._own_columns(route, columns)), num_rows))
        for name, layer in self._layers.items():
            made = LayerLoans(
                name,
                by_layer[name],
                transport=self._transport,
                weight_transport=self._weight_transport,
                layer=layer,
                gradient_return=self._gradient_return,
                send_all_weights=self.send_weights,
            )
            layer.loans = made
            self._layer_loans.append(made)

    def would_be_new(self, loans: Sequence[Loan], epoch: int) -> bool:
        """Tell whether ``loans`` are not in force yet, so :meth:`install` would send their columns to the group."""
        return bool(loans) and self._key(loans, epoch) != self._in_force

    def take_back(self) -> None:
        """End all loans: wait for their transfers and free their memory; before units move, on every rank."""
        if self._in_force is None:
            return
        self._in_force = None
        in_force, self._layer_loans = self._layer_loans, []
        for layer in self._layers.values():
            layer.loans = None
        with ExitStack() as ending:  # each runs even if others fail; the last one runs first
            ending.callback(self._gradient_return.finish_sending)
            for loans in in_force:
                ending.callback(loans.finish_sending)
            ending.callback(self._gradient_return.forget)

    def close(self) -> None:
        """End all loans and leave the weights' process group."""
        with ExitStack() as ending:
            ending.callback(self._weight_group.close)
            ending.callback(self.take_back)

    def send_weights(self) -> None:
        """Send the lent columns of all weights, which must not change until the next optimizer step.

        Every rank must call it at the same place among its collectives.
        """
        if self._in_force is None:
            return
        with torch.profiler.record_function("zeroresize::lend"):
            self._gradient_return.forget()
            self._gradient_return.finish_sending()
            for loans in self._layer_loans:
                loans.send_weights()

    @property
    def bytes_held(self) -> int:
        """Memory of weights that are lent and borrowed, and of what is being sent."""
        of_weights = sum(loans.bytes_held for loans in self._layer_loans)
        return of_weights + self._transport.bytes_held + self._weight_transport.bytes_held

    @property
    def bytes_moved(self) -> int:
        """Bytes of all transfers so far; each counts at one of its ends."""
        return self._transport.bytes_moved + self._weight_transport.bytes_moved

    def _key(self, loans: Sequence[Loan], epoch: int) -> _InForce:
        return tuple(loans), epoch, tuple(segment.owned for segment in all_segments(self._layers))

    def _lent_shapes(self, loan: Loan) -> dict[str, tuple[int, int]]:
        """[N, L] of what the owner lends of every layer, alike on every rank; without layers where that is nothing."""
        shapes = {}
        for name, layer in self._layers.items():
            num_rows, num_columns = shard_shape(layer, loan.owner)
            shapes[name] = num_rows, num_lent(num_columns, loan.share, is_forced=self._is_forced)
        return {name: shape for name, shape in shapes.items() if 0 not in shape}

    def _tell_columns(
        self, loan: Loan, lent: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, Tensor]:
        """The owner's lent columns of the layers of which it lends ``shapes``, on every rank."""
        if not shapes:
            return {}
        counts = [num_columns for _, num_columns in shapes.values()]
        if loan.owner == self._rank:
            indices = torch.cat([lent[name].to(self._device) for name in shapes])
        else:
            indices = torch.empty(sum(counts), dtype=torch.int64, device=self._device)
        broadcast(indices, loan.owner, self._group)
        return dict(zip(shapes, indices.split(counts), strict=True))

    def _own_columns(self, route: LoanRoute, columns: Tensor) -> Tensor:
        if self._rank == route.owner:
            return columns
        return columns[route.part_of(self._rank)] if self._rank in route.receivers else columns[:0]

    @property
    def _device(self) -> torch.device:
        return next(iter(self._layers.values())).local_weight.device
