"""Samples of different lengths, nobody slow: torchrun --nproc-per-node 2 -m scripts.bench.uneven_lengths

Copies of a model train on the same samples, whose lengths are like FLANv2's, one epoch in turn with the others:
``plain`` has torch's DistributedSampler, ``even`` equal counts of each global batch, cut by differencing (Karmarkar and
Karp; pairs of samples of like lengths), ``balanced`` a DataBalancer with lengths. Rows are not padded: linear layers
see all tokens of a rank, attention each row by itself.
"""

from __future__ import annotations

import heapq
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import zeroresize as zr
from lm_examples.task_lengths import draw_pairs
from scripts.bench.common import bootstrap_interval, in_turns, join_ranks, parser_of, pin_to_core, run, save, show


class Rows(nn.Module):
    """Attention of each row by itself, between linear layers of all tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        rows = zip(*(each[None].split(lengths, dim=1) for each in (q, k, v)), strict=True)
        x = x + self.out(torch.cat([scaled_dot_product_attention(*row, is_causal=True) for row in rows], dim=1)[0])
        return x + self.down(nn.functional.gelu(self.up(x)))


class EvenCounts:
    """Batch sampler: two ranks have as many samples of each global batch, whose sums of lengths are nearly equal."""

    def __init__(self, lengths: np.ndarray, global_batch: int) -> None:
        self.lengths, self.global_batch, self.epoch = lengths, global_batch, 0

    def __iter__(self) -> Any:
        order = np.random.default_rng(self.epoch).permutation(len(self.lengths))
        self.epoch += 1
        for begin in range(0, len(order), self.global_batch):
            yield self.half_of(sorted(order[begin : begin + self.global_batch].tolist(), key=self.lengths.__getitem__))

    def half_of(self, rising: list[int]) -> list[int]:
        """Pairs of neighbours differ least; the largest differences are set against each other."""
        pairs = zip(rising[::2], rising[1::2], strict=True)
        heap = [(float(self.lengths[few] - self.lengths[many]), [many], [few]) for few, many in pairs]
        heapq.heapify(heap)
        while len(heap) > 1:
            (first, mine, others), (second, *next_parts) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (first - second, mine + next_parts[1], others + next_parts[0]))
        return heap[0][1 + dist.get_rank()]


class Copy:
    """A model in training."""

    def __init__(self, options: Any, kind: str, lengths: np.ndarray) -> None:
        torch.manual_seed(0)
        self.model, self.lengths = DistributedDataParallel(Rows(options.hidden)), lengths
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randn(options.global_batch * int(lengths.max()), options.hidden)
        self.balancer: zr.DataBalancer | None = None
        indices, half = range(len(lengths)), options.global_batch // 2
        if kind == "plain":
            self.sampler = DistributedSampler(indices)
            self.loader = DataLoader(indices, batch_size=half, sampler=self.sampler, collate_fn=list)
        elif kind == "even":
            self.loader = DataLoader(indices, batch_sampler=EvenCounts(lengths, options.global_batch), collate_fn=list)
        else:
            self.balancer = zr.DataBalancer(self.model, self.optimizer, global_batch=options.global_batch)
            sampler = self.balancer.sampler(indices, lengths)
            self.loader = DataLoader(indices, batch_sampler=sampler, collate_fn=list)

    def epoch(self) -> float:
        """Seconds of an epoch, all samples once."""
        dist.barrier()
        begin = time.perf_counter()
        for indices in self.loader:
            lengths = self.lengths[indices].tolist()
            loss = self.model(self.tokens[: sum(lengths)], lengths).square().mean()
            if self.balancer is not None:
                loss = loss * self.balancer.loss_scale(sum(lengths))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.balancer is not None:
                self.balancer.step()
        return time.perf_counter() - begin


def main() -> None:
    defaults = {"hidden": 128, "global_batch": 64, "num_samples": 1024, "longest": 2048, "rounds": 10}
    options = parser_of(__doc__, **defaults).parse_args()
    join_ranks(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    pin_to_core()
    lengths = np.minimum(draw_pairs(options.num_samples, np.random.default_rng(0)).sum(axis=1), options.longest)
    copies = {kind: Copy(options, kind, lengths) for kind in ("plain", "even", "balanced")}
    for copy in copies.values():
        copy.epoch()
    seconds = in_turns({kind: copy.epoch for kind, copy in copies.items()}, options.rounds)
    rows = []
    for kind, of_kind in seconds.items():
        ratios = [mine / plain for mine, plain in zip(of_kind, seconds["plain"], strict=True)]
        low, high = bootstrap_interval(ratios)
        rows.append([kind, f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]", f"{np.median(of_kind):.2f}"])
    if dist.get_rank() == 0:
        show("Epochs, of torch's DistributedSampler", ["", "ratio", "seconds"], rows)
        save("uneven_lengths", {"options": vars(options), "results": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
