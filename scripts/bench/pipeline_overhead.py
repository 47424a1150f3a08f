"""What balancing costs where nothing is to be balanced: torchrun --nproc-per-node 2 -m scripts.bench.pipeline_overhead

Ten steps with the balancer and twice ten without it are trained in turns, on the same layers, with the balancer's
default options but that nothing may move (``min_saving``). Before, it has learned what its profiles cost. A round is as
many turns as make three profiles at the interval that it has chosen then, so profiles, their exchange and the decisions
are in it at their true share. Ratios are of the seconds of whole rounds: of wall time, and of the processor's time of
all ranks together, which tells more where wall time is noisy; beside them those of the steps that are both without.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.common import describe_ratio, gather_from_ranks, in_turns, join_ranks, parser_of, run, save
from zeroresize.pipeline import Pipeline, PipelineBalancer

#: Steps in which it learns, that is of several profiles.
_LEARNING = 400
#: Steps of a turn, and profiles of a round.
_CHUNK, _PROFILES = 10, 3
#: Wall seconds, and seconds of the ranks' processors.
Window = tuple[float, float]


def main() -> None:
    options = parser_of(__doc__, rounds=20, hidden=256, rows=256, layers=12, count_work=False).parse_args()
    device = join_ranks(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert dist.group.WORLD is not None
    blocks = (nn.Sequential(nn.Linear(options.hidden, options.hidden), nn.ReLU()) for _ in range(options.layers))
    pipeline = Pipeline(
        [block.to(device) for block in blocks],
        nn.functional.mse_loss,
        num_microbatches=4,
        process_group=dist.group.WORLD,
        device=device,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters())
    intervals, costs = [0], [math.nan]

    def note(record: object) -> None:
        intervals.append(getattr(record, "profile_every", 0))
        costs.append(getattr(record, "profile_cost", math.nan))

    x = torch.randn(options.rows, options.hidden, device=device)

    def wait_for_all() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def chunk(balancer: PipelineBalancer | None) -> Window:
        wait_for_all()
        begin, spent_begin = time.perf_counter(), time.process_time()
        for _ in range(_CHUNK):
            optimizer.zero_grad()
            block: AbstractContextManager[None] = nullcontext() if balancer is None else balancer.step()
            with block:
                pipeline.step(x, target=x)
            optimizer.step()
        spent_s = time.process_time() - spent_begin
        wait_for_all()
        return time.perf_counter() - begin, spent_s

    chunk(None)
    balancer = PipelineBalancer(
        pipeline,
        optimizer,
        min_saving=0.99,
        on_profile=note,
        count_work="tokens" if options.count_work else None,
    )
    for _ in range(_LEARNING // _CHUNK):
        chunk(balancer)
    num_chunks = math.ceil(_PROFILES * intervals[-1] / _CHUNK)
    variants = {"balanced": lambda: chunk(balancer), "plain": lambda: chunk(None), "again": lambda: chunk(None)}
    windows: dict[str, list[Window]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, parts in in_turns(variants, num_chunks).items():
            wall_s, spent_s = (math.fsum(seconds) for seconds in zip(*parts, strict=True))
            windows[name].append((wall_s, math.fsum(gather_from_ranks(spent_s))))
    balanced, plain, again = windows.values()
    if dist.get_rank() == 0:
        wall_ratios, spent_ratios = (_ratios(balanced, plain, again, at) for at in (0, 1))
        wall_noise, spent_noise = (_ratios(again, plain, plain, at) for at in (0, 1))
        step_s = statistics.median(wall for wall, _ in plain) / (num_chunks * _CHUNK)
        print(f"a step without balancing: {1e3 * step_s:.1f} ms; rounds of {num_chunks * _CHUNK} steps")
        print(f"intervals: {intervals[1:]}; a profile takes {costs[-1]:.3f} steps, as the balancer measures it")
        print(describe_ratio("wall: balanced / not", wall_ratios))
        print(describe_ratio("wall: not / not", wall_noise))
        print(describe_ratio("processors: balanced / not", spent_ratios))
        print(describe_ratio("processors: not / not", spent_noise))
        ratios = {"wall": wall_ratios, "wall_noise": wall_noise, "spent": spent_ratios, "spent_noise": spent_noise}
        save("pipeline_overhead", {"step_s": step_s, "intervals": intervals[1:], **ratios, **vars(options)})
    dist.destroy_process_group()


def _ratios(over: list[Window], under: list[Window], other: list[Window], at: int) -> list[float]:
    """Round by round, against the mean of the two below."""
    return [
        window[at] / statistics.fmean((below[at], beside[at]))
        for window, below, beside in zip(over, under, other, strict=True)
    ]


if __name__ == "__main__":
    run(main)
