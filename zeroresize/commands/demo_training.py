"""What the ranks of ``zeroresize demo`` do: they train blocks of a transformer, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr
from zeroresize.commands.ranks import LIMIT, Member

_WIDTH, _HEAD, _NUM_BLOCKS, _NUM_CLASSES = 384, 24, 2, 10
_BATCH, _TOKENS, _UPDATE_EVERY = 8, 48, 5

#: Its share of all seconds, χ by rank, and whether balancing is on.
Phase = tuple[float, Mapping[int, float], bool]


class Block(nn.Module):
    """Attention and a feed-forward layer of x [B, S, WIDTH]; a rank has as many heads and neurons as its layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        heads = (layer(normed).unflatten(2, (-1, _HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.between(x))))

    @property
    def segments(self) -> list[zr.Segment]:
        """What may move between ranks, once the layers are split."""
        heads = zr.Segment([self.q, self.k, self.v], self.out, unit_size=_HEAD, kind="heads")
        return [heads, zr.Segment([self.up], self.down, kind="neurons")]


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
    blocks = [Block() for _ in range(_NUM_BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(_WIDTH, _NUM_CLASSES))
    for block in blocks:
        plan = {name: zr.ColwiseParallel() for name in ("q", "k", "v", "up")}
        parallelize_module(block, mesh, {**plan, "out": zr.RowwiseParallel(), "down": zr.RowwiseParallel()})
    zr.convert(model, segments=[segment for block in blocks for segment in block.segments])
    optimizer = torch.optim.AdamW(model.parameters())
    tells = zr.JsonLinesTelemetry(path) if member.rank == 0 else None
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(update_every=_UPDATE_EVERY), on_status=tells)

    def update() -> float:
        began = time.perf_counter()
        for _ in range(_UPDATE_EVERY):
            x, target = torch.randn(_BATCH, _TOKENS, _WIDTH), torch.randint(_NUM_CLASSES, (_BATCH,))
            nn.functional.cross_entropy(model(x).mean(1), target).backward()
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
