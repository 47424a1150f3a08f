"""The pre-test of migrating: what communication adds to a step in which one rank lends (Φ1 of section IV-B)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.collectives import all_reduce, group_rank, group_size
from zeroresize.lending import CARRIERS
from zeroresize.linear import BalancedLinear
from zeroresize.migration.buffers import Buffers
from zeroresize.migration.carrier import Carrier, Route
from zeroresize.migration.ranges import bounds_of_parts
from zeroresize.policy.cost_model import MigrationCost
from zeroresize.policy.selection import num_lent

#: Shares of its columns that one rank lends in the pre-test: between and beyond, the cost is a straight line.
_LENT = (0.25, 0.75)
#: Rounds that fit into the budget, no more than these.
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class _Shape:
    num_tokens: int
    num_columns: int
    num_outputs: int
    is_column_parallel: bool
    dtype: torch.dtype
    device: torch.device


def measure_migration_cost(
    layers: Mapping[str, BalancedLinear], process_group: ProcessGroup, migrate: str, budget_s: float = 1.0
) -> MigrationCost:
    """What all transfers of a step take when one rank lends, none of them hidden behind work; collective.

    Every distinct shape is measured once and counted as often as layers have it. In training some of it overlaps, and
    ranks wait for each other's results: what training shows corrects the scale.

    Args:
        layers: balanced layers by name; those are measured that have seen the training forwards of one iteration.
        process_group: their tensor-parallel group.
        migrate: how slices travel.
        budget_s: seconds it may take, roughly; one round runs in any case.
    """
    shapes: Counter[_Shape] = Counter()
    for layer in layers.values():
        if layer.num_tokens > 0:
            w_NK = layer.weight
            shapes[
                _Shape(
                    layer.num_tokens,
                    w_NK.shape[1],
                    w_NK.shape[0],
                    layer.is_column_parallel,
                    layer.compute_dtype,
                    w_NK.device,
                )
            ] += 1
    if not shapes:
        return MigrationCost()
    rounds = [_round(shapes, process_group, migrate)]
    affordable = int(budget_s / max(sum(rounds[0]), 1e-6))
    rounds += [_round(shapes, process_group, migrate) for _ in range(min(affordable, _MOST_ROUNDS) - 1)]
    small_s, large_s = (min(seconds) for seconds in zip(*rounds, strict=True))
    per_share_s = max(large_s - small_s, 0.0) / (_LENT[1] - _LENT[0])
    return MigrationCost(max(small_s - _LENT[0] * per_share_s, 0.0), per_share_s)


def _round(shapes: Mapping[_Shape, int], process_group: ProcessGroup, migrate: str) -> list[float]:
    """Seconds of a step's transfers at each of ``_LENT``, of the slowest rank: the same numbers on all."""
    buffers = Buffers()
    carrier = CARRIERS[migrate](process_group, group_rank(process_group), buffers)
    seconds = [sum(count * _time_transfers(shape, lent, carrier) for shape, count in shapes.items()) for lent in _LENT]
    device = next(iter(shapes)).device
    every_rank = torch.zeros(group_size(process_group), len(_LENT), dtype=torch.float64, device=device)
    every_rank[carrier.rank] = torch.tensor(seconds, dtype=torch.float64)
    all_reduce(every_rank, process_group)
    return every_rank.max(dim=0).values.tolist()


def _time_transfers(shape: _Shape, lent: float, carrier: Carrier) -> float:
    """Rank 0 lends to all others, once through forward and backward of a layer."""
    num_receivers = group_size(carrier.process_group) - 1
    num_columns = num_lent(shape.num_columns, lent)
    bounds = bounds_of_parts(num_columns, [1.0 / num_receivers] * num_receivers)
    route = Route(0, tuple(range(1, num_receivers + 1)), bounds)
    like = torch.zeros(1, dtype=shape.dtype, device=shape.device)
    x_TK, y_TN, w_NK = (
        torch.zeros(*size, dtype=shape.dtype, device=shape.device)
        for size in (
            (shape.num_tokens, shape.num_columns),
            (shape.num_tokens, shape.num_outputs),
            (shape.num_outputs, shape.num_columns),
        )
    )
    is_owner, is_receiver = carrier.rank == route.owner, carrier.rank in route.receivers
    columns = torch.arange(num_columns, device=shape.device)
    own = columns[route.part_of(carrier.rank)] if is_receiver else columns

    def packed(tensor: Tensor) -> Tensor | None:
        return tensor.index_select(1, columns) if is_owner else None

    def part(tensor: Tensor) -> Tensor | None:
        return tensor.index_select(1, own) if is_receiver else None

    def send_home(num_rows: int, tensor: Tensor, name: str) -> None:
        carrier.send_home(route, part(tensor), num_rows, like, name).wait()

    def forward_and_backward() -> None:
        carrier.send_slice(route, packed(w_NK), shape.num_outputs, like, "w").wait()
        if shape.is_column_parallel:
            carrier.send_sum(route, y_TN, "y").wait()
            carrier.send_whole(route, y_TN, "dy").wait()
            if not carrier.merges:
                send_home(shape.num_tokens, x_TK, "dx")
        else:
            carrier.send_slice(route, packed(x_TK), shape.num_tokens, like, "x").wait()
            if not carrier.merges:
                carrier.send_sum(route, y_TN, "y").wait()
            send_home(shape.num_tokens, x_TK, "dx")
        send_home(shape.num_outputs, w_NK, "dw")
        carrier.buffers.finish_sending()

    forward_and_backward()  # first calls set up buffers and connections
    all_reduce(like, carrier.process_group)
    _rest(shape.device)
    began = time.perf_counter()
    forward_and_backward()
    all_reduce(like, carrier.process_group)
    _rest(shape.device)
    return time.perf_counter() - began


def _rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
