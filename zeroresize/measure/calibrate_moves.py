"""Calibration of moving units: seconds of a message between neighbouring ranks, by its size."""

from __future__ import annotations

import time

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, start_receive, start_send

#: Bytes of a small and of a large message, and how often each is sent; the fastest counts, since noise only adds time.
_SMALL, _LARGE, _ROUNDS = 2**10, 2**22, 4


def measure_move_cost(process_group: ProcessGroup, device: torch.device) -> tuple[float, float]:
    """(seconds per byte, seconds of the smallest move) of this rank, all ranks sending at once; collective.

    Every rank sends to the next one while it receives from the one before.
    """
    small_s, large_s = (min(_seconds(process_group, device, size) for _ in range(_ROUNDS)) for size in (_SMALL, _LARGE))
    return max(large_s - small_s, 0.0) / (_LARGE - _SMALL), small_s


def _seconds(process_group: ProcessGroup, device: torch.device, size: int) -> float:
    rank, num_ranks = group_rank(process_group), group_size(process_group)
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    began = time.perf_counter()
    transfers = [
        *start_receive(received, (rank - 1) % num_ranks, process_group),
        *start_send(sent, (rank + 1) % num_ranks, process_group),
    ]
    for transfer in transfers:
        transfer.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
