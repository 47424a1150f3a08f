"""What the ranks of ``zeroresize demo`` do: they train a small model, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr
from zeroresize.commands.ranks import LIMIT, Member

_WIDTH, _NUM_BLOCKS, _NUM_CLASSES = 256, 3, 10
_BATCH, _UPDATE_EVERY = 384, 5

#: Its share of all seconds, χ by rank, and whether balancing is on.
Phase = tuple[float, Mapping[int, float], bool]


def train(
    member: Member, send: Callable[[Any], None], phases: Sequence[Phase], began: float, seconds: float, path: str
) -> None:
    """Train all phases, until so many seconds have passed since it began, or a third of them since now.

    Rank 0 sends (number of the phase, seconds of a step) at each update.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal weights and batches on all ranks
    dist.init_process_group("gloo", store=member.store, rank=member.rank, world_size=member.num_ranks, timeout=LIMIT)
    mesh = init_device_mesh("cpu", (member.num_ranks,))
    blocks = [
        nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.ReLU(), nn.Linear(4 * _WIDTH, _WIDTH))
        for _ in range(_NUM_BLOCKS)
    ]
    model = nn.Sequential(*blocks, nn.Linear(_WIDTH, _NUM_CLASSES))
    for block in blocks:
        parallelize_module(block, mesh, {"1": zr.ColwiseParallel(), "3": zr.RowwiseParallel()})
    zr.convert(model, segments=[zr.Segment([block[1]], block[3], kind="neurons") for block in blocks])
    optimizer = torch.optim.AdamW(model.parameters())
    tells = zr.JsonLinesTelemetry(path) if member.rank == 0 else None
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(update_every=_UPDATE_EVERY), on_status=tells)

    def update() -> float:
        began = time.perf_counter()
        for _ in range(_UPDATE_EVERY):
            x, target = torch.randn(_BATCH, _WIDTH), torch.randint(_NUM_CLASSES, (_BATCH,))
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
        return (time.perf_counter() - began) / _UPDATE_EVERY

    update()  # sets up what is set up once
    left_s = max(began + seconds - time.time(), seconds / 3)
    with zr.StragglerInjector(model, process_group=mesh, chi={}) as injector:
        for number, (share, chi, is_balanced) in enumerate(phases):
            injector.set_chi(chi)
            if is_balanced:
                balancer.resume()
            else:
                balancer.pause(advice=True)
            ends, is_over = time.perf_counter() + share * left_s, torch.zeros(1)
            while not is_over:
                step_s = update()
                if member.rank == 0:
                    send((number, step_s))
                    is_over.fill_(time.perf_counter() >= ends)
                dist.broadcast(is_over, 0)
    balancer.close()
    dist.destroy_process_group()
