"""What a move of units costs beside its messages alone: torchrun --nproc-per-node 2 -m scripts.bench.move

A stack of attention and feed-forward layers with AdamW state. Rank 1 gives 43 % of its neurons and one of its four
heads to rank 0, and gets them back. In turns with that, one buffer of as many bytes is sent from rank to rank: bytes /
measured bandwidth, below which no move can be; and every rank copies as many bytes as its new tensors have into fresh
memory, which a move that is all or nothing does besides. Ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.common import interval_of_ratio, pin_to_core, save, time_slowest_rank
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.units.moving_units import UnitMoveReport, move_units

GIVEN_NEURONS, HEADS_OF_RANK = 0.43, 4


def make_segment(name: str, kind: str, width: int, num_units: int, rows: int, num_columns: int) -> OwnedSegment:
    """Some column-parallel layers that read one x, and a row-parallel one; ``rows`` of every unit in each."""
    group = dist.group.WORLD
    assert group is not None
    size = num_units * rows
    tensors = []
    for number in range(num_columns):
        column = ColumnParallelLinear(width, size, process_group=group)
        for attribute in ("weight", "bias"):
            tensors.append(UnitTensor(column, attribute, f"{name}.{number}.{attribute}", 0, (rows,)))
    row = RowParallelLinear(size, width, process_group=group)
    tensors.append(UnitTensor(row, "weight", f"{name}.row.weight", 1, (rows,)))
    return OwnedSegment(name, kind, (), tuple(tensors), OwnershipMap.even(num_units, dist.get_world_size()))


def stepped_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An AdamW with its state, after a step."""
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def send_buffer(buffer: torch.Tensor, source: int) -> None:
    """Send ``buffer`` from rank ``source`` to the other of two ranks, and wait; both ranks call it."""
    (dist.isend(buffer, 1 - source) if dist.get_rank() == source else dist.irecv(buffer, source)).wait()


def fill_fresh_memory(source: torch.Tensor) -> None:
    """Copy to where nothing has been before."""
    torch.empty_like(source).copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10, help="moves there and back")
    parser.add_argument("--max-mib", type=int, default=64, help="of messages at once")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pin_to_core()
    num_heads, num_neurons = 2 * HEADS_OF_RANK, 4 * arguments.hidden
    segments = []
    for layer in range(arguments.layers):
        head_size = arguments.hidden // num_heads
        segments.append(make_segment(f"{layer}.attention", "heads", arguments.hidden, num_heads, head_size, 3))
        segments.append(make_segment(f"{layer}.mlp", "neurons", arguments.hidden, num_neurons, 1, 1))
    optimizer = stepped_adamw([one.parameter for segment in segments for one in segment.tensors])
    home = {segment.name: segment.owned for segment in segments}
    away = {}
    for segment in segments:
        count = segment.owned.counts[1]
        given = 1 if segment.kind == "heads" else round(GIVEN_NEURONS * count / 8) * 8
        away[segment.name] = segment.owned.with_counts((count + given, count - given))
    moves: list[float] = []
    messages: list[float] = []
    copies: list[float] = []
    report: UnitMoveReport | None = None

    def move(targets: dict[str, OwnershipMap]) -> None:
        nonlocal report
        group = dist.group.WORLD
        assert group is not None
        max_bytes = arguments.max_mib * 2**20
        report = move_units(segments, targets, process_group=group, optimizer=optimizer, max_bytes=max_bytes)

    for repeat in range(arguments.repeats + 1):
        for source, targets in ((1, away), (0, home)):
            move_s = time_slowest_rank(lambda targets=targets: move(targets))
            assert report is not None
            buffer = torch.ones(report.sent_bytes + report.received_bytes, dtype=torch.uint8)
            message_s = time_slowest_rank(lambda buffer=buffer, source=source: send_buffer(buffer, source))
            source_bytes = torch.ones(report.new_bytes, dtype=torch.uint8)
            copy_s = time_slowest_rank(lambda source_bytes=source_bytes: fill_fresh_memory(source_bytes))
            if repeat:  # the first one warms up
                moves.append(move_s)
                messages.append(message_s)
                copies.append(copy_s)
    assert report is not None
    low, high = interval_of_ratio(moves, messages)
    num_bytes = report.sent_bytes + report.received_bytes
    figures = {
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "bytes": num_bytes,
        "rounds": report.num_rounds,
        "buffer_bytes": report.buffer_bytes,
        "new_bytes": report.new_bytes,
        "move_s": statistics.median(moves),
        "message_s": statistics.median(messages),
        "copy_s": statistics.median(copies),
        "ratio": statistics.median(moves) / statistics.median(messages),
        "interval": [low, high],
    }
    if dist.get_rank() == 0:
        print(
            f"hidden {arguments.hidden}, {arguments.layers} layers: {num_bytes / 1e6:.1f} MB in {report.num_rounds} "
            f"rounds, {figures['move_s']:.3f} s; the bytes alone {figures['message_s']:.3f} s "
            f"({num_bytes / figures['message_s'] / 1e9:.2f} GB/s): {figures['ratio']:.2f} [{low:.2f}, {high:.2f}]; "
            f"copying as much as the new tensors hold {figures['copy_s']:.3f} s"
        )
        save("move", figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
