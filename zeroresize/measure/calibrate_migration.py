"""Calibration of migration: what communication adds to a step in which one rank lends (Φ1 of section IV-B)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_size
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.migration.transport import LoanRoute, Transport, bounds_of_parts, make_transport
from zeroresize.policy.tensor.columns.order import num_lent
from zeroresize.policy.tensor.costs import MigrationCost

#: Shares of its columns that one rank lends in the calibration. The cost is taken to be a straight line through them.
_LENT = (0.25, 0.75)
#: Bounds of the number of rounds, which follows from the budget. The fastest round counts: noise only adds time.
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 5


@dataclass(frozen=True)
class _Shape:
    num_tokens: int  # of one forward
    num_micro_batches: int
    num_recomputations: int  # forwards of activation checkpointing, beyond one a micro-batch
    num_columns: int
    num_outputs: int
    is_column_parallel: bool
    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layer: BalancedLinear) -> _Shape:
        num_outputs, num_columns = layer.even_shape  # units may be away, and all ranks must measure alike
        return cls(
            num_tokens=layer.num_tokens // layer.num_forwards,
            num_micro_batches=layer.num_forwards - layer.num_recomputations,
            num_recomputations=layer.num_recomputations,
            num_columns=num_columns,
            num_outputs=num_outputs,
            is_column_parallel=layer.is_column_parallel,
            weight_dtype=layer.local_weight.dtype,
            dtype=layer.compute_dtype,
            device=layer.local_weight.device,
        )


def measure_migration_cost(
    layers: Mapping[str, BalancedLinear], process_group: ProcessGroup, migration_transport: str, budget_s: float = 1.0
) -> MigrationCost:
    """Measure the seconds of all transfers of a step when one rank lends and nothing overlaps; collective.

    Every distinct shape is measured once and counted as often as layers have it. In training some transfers overlap,
    and ranks wait for each other's results; what training shows corrects the scale later.

    Args:
        layers: balanced layers by name; measured are those that ran training forwards in the last iteration.
        process_group: their tensor-parallel group.
        migration_transport: how slices travel.
        budget_s: seconds it may take, roughly; ``_FEWEST_ROUNDS`` rounds run in any case.

    Raises:
        ValueError: if no layer has run a training forward.
    """
    shapes = Counter(_Shape.of(layer) for layer in layers.values() if layer.num_tokens > 0)
    if not shapes:
        raise ValueError("no layer has seen a training forward yet: there is nothing to measure")
    rounds = [_round(shapes, process_group, migration_transport)]
    affordable = int(budget_s / max(sum(rounds[0]), 1e-6))
    num_rounds = max(_FEWEST_ROUNDS, min(affordable, _MOST_ROUNDS))
    rounds += [_round(shapes, process_group, migration_transport) for _ in range(num_rounds - 1)]
    small_s, large_s = (min(seconds) for seconds in zip(*rounds, strict=True))
    per_share_s = max(large_s - small_s, 0.0) / (_LENT[1] - _LENT[0])
    return MigrationCost(max(small_s - _LENT[0] * per_share_s, 0.0), per_share_s)


def _round(shapes: Mapping[_Shape, int], process_group: ProcessGroup, migration_transport: str) -> list[float]:
    """Seconds of a step's transfers at each of ``_LENT``, of the slowest rank: the same numbers on all."""
    transport = make_transport(migration_transport, process_group)
    seconds = [
        sum(count * _time_transfers(shape, lent, transport) for shape, count in shapes.items()) for lent in _LENT
    ]
    device = next(iter(shapes)).device
    every_rank = torch.zeros(group_size(process_group), len(_LENT), dtype=torch.float64, device=device)
    every_rank[transport.rank] = torch.tensor(seconds, dtype=torch.float64)
    all_reduce(every_rank, process_group)
    return every_rank.max(dim=0).values.tolist()


def _time_transfers(shape: _Shape, lent: float, transport: Transport) -> float:
    """Seconds of a layer's transfers in a step in which rank 0 lends to all others."""
    transfers = _Transfers(shape, lent, transport)
    transfers.send_weights()  # first calls set up buffers and connections
    transfers.forward_and_backward()
    seconds = transfers.time(transfers.send_weights)
    seconds += shape.num_micro_batches * transfers.time(transfers.forward_and_backward)
    if shape.num_recomputations:
        seconds += shape.num_recomputations * transfers.time(transfers.forward)
    return seconds


class _Transfers:
    """The transfers of one layer, with zeros as content."""

    def __init__(self, shape: _Shape, lent: float, transport: Transport) -> None:
        self._shape, self._transport = shape, transport
        num_receivers = group_size(transport.process_group) - 1
        num_columns = num_lent(shape.num_columns, lent)
        bounds = bounds_of_parts(num_columns, [1.0 / num_receivers] * num_receivers)
        self._route = LoanRoute(0, tuple(range(1, num_receivers + 1)), bounds)
        self._is_owner = transport.rank == 0
        columns = torch.arange(num_columns, device=shape.device)
        self._columns = columns if self._is_owner else columns[self._route.part_of(transport.rank)]
        self._x_TK = self._zeros(shape.num_tokens, shape.num_columns)
        self._y_TN = self._zeros(shape.num_tokens, shape.num_outputs)
        self._dw_NK = self._zeros(shape.num_outputs, shape.num_columns)
        self._w_NK = self._dw_NK.to(shape.weight_dtype)

    def send_weights(self) -> None:
        """Once a step."""
        self._send_out(self._w_NK, "w")

    def forward_and_backward(self) -> None:
        """Once a micro-batch."""
        self.forward()
        self._backward()

    def forward(self) -> None:
        """Once more for every recomputation."""
        if not self._shape.is_column_parallel:
            self._send_out(self._x_TK, "x")
        if self._shape.is_column_parallel or not self._transport.merges:
            self._sum_up()

    def time(self, transfer: Callable[[], None]) -> float:
        """Seconds until it is done on every rank."""
        self._meet()
        began = time.perf_counter()
        transfer()
        self._transport.finish_sending()
        self._meet()
        return time.perf_counter() - began

    def _backward(self) -> None:
        if self._shape.is_column_parallel:
            self._transport.send_whole(self._route, self._y_TN, self._shape.num_outputs).wait()
        if not self._shape.is_column_parallel or not self._transport.merges:
            self._return_slice(self._x_TK, "dx")
        self._return_slice(self._dw_NK, "dw")

    def _sum_up(self) -> None:
        y_TN = self._y_TN
        if self._is_owner:
            expected = self._transport.expect_addends(self._route, tuple(y_TN.shape), y_TN)
            self._transport.add_up(self._route, y_TN, expected).wait()
        else:
            self._transport.give(self._route, y_TN, "y")

    def _send_out(self, matrix: Tensor, name: str) -> None:
        packed = matrix.index_select(1, self._columns) if self._is_owner else None
        self._transport.send_slice(self._route, packed, len(matrix), matrix, name).wait()

    def _return_slice(self, matrix: Tensor, name: str) -> None:
        part = None if self._is_owner else matrix.index_select(1, self._columns)
        self._transport.return_slice(self._route, part, len(matrix), matrix, name).wait()

    def _meet(self) -> None:
        all_reduce(torch.zeros(1, device=self._shape.device), self._transport.process_group)
        if self._shape.device.type == "cuda":
            torch.cuda.synchronize(self._shape.device)

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=self._shape.dtype, device=self._shape.device)
