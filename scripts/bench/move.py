"""What a move of units costs beside its messages alone: torchrun --nproc-per-node 2 -m scripts.bench.move

A stack of attention and feed-forward layers with AdamW state. Rank 1 gives 43 % of its neurons and one of its four
heads to rank 0, and gets them back. In turns with that, one buffer of as many bytes is sent from rank to rank: bytes /
measured bandwidth, below which no move can be; and every rank copies as many bytes as its new tensors have into fresh
memory, which a move that is all or nothing does besides. Ratios are those of the medians.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.common import interval_of_ratio, parser_of, pin_to_core, run, save, time_slowest_rank
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.units.moving_units import UnitMoveReport, move_units

GIVEN_NEURONS, HEADS_OF_RANK = 0.43, 4


def make_segment(name: str, kind: str, width: int, num_units: int, rows: int, num_columns: int) -> OwnedSegment:
    """Some column-parallel layers that read one x, and a row-parallel one; ``rows`` of every unit in each."""
    group = dist.group.WORLD
    size = num_units * rows
    tensors = []
    for number in range(num_columns):
        column = ColumnParallelLinear(width, size, process_group=group)
        for attribute in ("weight", "bias"):
            tensors.append(UnitTensor(column, attribute, f"{name}.{number}.{attribute}", 0, (rows,)))
    row = RowParallelLinear(size, width, process_group=group)
    tensors.append(UnitTensor(row, "weight", f"{name}.row.weight", 1, (rows,)))
    return OwnedSegment(name, kind, (), tuple(tensors), OwnershipMap.home(num_units, dist.get_world_size()))


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


def main() -> None:
    options = parser_of(__doc__, hidden=768, layers=4, repeats=10, max_mib=64).parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pin_to_core()
    num_heads, num_neurons = 2 * HEADS_OF_RANK, 4 * options.hidden
    segments = []
    for layer in range(options.layers):
        head_size = options.hidden // num_heads
        segments.append(make_segment(f"{layer}.attention", "heads", options.hidden, num_heads, head_size, 3))
        segments.append(make_segment(f"{layer}.mlp", "neurons", options.hidden, num_neurons, 1, 1))
    optimizer = stepped_adamw([tensor.parameter for segment in segments for tensor in segment.tensors])
    home = {segment.name: segment.owned for segment in segments}
    away = {}
    for segment in segments:
        count = segment.owned.counts[1]
        given = 1 if segment.kind == "heads" else round(GIVEN_NEURONS * count / 8) * 8
        away[segment.name] = segment.owned.with_counts((count + given, count - given))
    reports: list[UnitMoveReport] = []
    seconds: dict[str, list[float]] = {"move": [], "message": [], "copy": []}

    def move(targets: dict[str, OwnershipMap]) -> None:
        group, most = dist.group.WORLD, options.max_mib * 2**20
        reports.append(move_units(segments, targets, process_group=group, optimizer=optimizer, max_bytes=most))

    def measure(source: int, targets: dict[str, OwnershipMap]) -> dict[str, float]:
        move_s = time_slowest_rank(lambda: move(targets))
        buffer = torch.ones(reports[-1].sent_bytes + reports[-1].received_bytes, dtype=torch.uint8)
        message_s = time_slowest_rank(lambda: send_buffer(buffer, source))
        filled = torch.ones(reports[-1].new_bytes, dtype=torch.uint8)
        copy_s = time_slowest_rank(lambda: torch.empty_like(filled).copy_(filled))
        return {"move": move_s, "message": message_s, "copy": copy_s}

    for repeat in range(options.repeats + 1):
        for source, targets in ((1, away), (0, home)):
            for what, measured_s in measure(source, targets).items():
                seconds[what] += [measured_s] if repeat else []  # the first one warms up
    low, high = interval_of_ratio(seconds["move"], seconds["message"])
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    report, ratio = reports[-1], medians["move"] / medians["message"]
    num_bytes = report.sent_bytes + report.received_bytes
    if dist.get_rank() == 0:
        print(
            f"hidden {options.hidden}, {options.layers} layers: {num_bytes / 1e6:.1f} MB in {report.num_rounds} "
            f"rounds, {medians['move']:.3f} s; the bytes alone {medians['message']:.3f} s "
            f"({num_bytes / medians['message'] / 1e9:.2f} GB/s): {ratio:.2f} [{low:.2f}, {high:.2f}]; "
            f"copying as much as the new tensors hold {medians['copy']:.3f} s"
        )
        sizes = {"bytes": num_bytes, "rounds": report.num_rounds, "new_bytes": report.new_bytes}
        save("move", {**vars(options), **sizes, "seconds": medians, "ratio": ratio, "interval": [low, high]})
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
