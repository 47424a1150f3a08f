"""What balancing costs where nothing is to be balanced: torchrun --nproc-per-node 2 -m scripts.bench.pipeline_overhead

Windows of as many steps as lie between two profiles are trained with the balancer and without it, in turns, on the same
layers. Nothing may move (``min_saving``). The ratio is of the windows' whole seconds, so it has the profile, the
exchange and the decision of a window in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.common import describe_ratio, save
from zeroresize.pipeline import Pipeline, PipelineBalancer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile-every", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert dist.group.WORLD is not None
    layers = [nn.Sequential(nn.Linear(options.hidden, options.hidden), nn.ReLU()) for _ in range(12)]
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    balancer = PipelineBalancer(pipeline, optimizer, profile_every=options.profile_every, min_saving=0.99)
    x = torch.randn(256, options.hidden)

    def window(is_balanced: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(options.profile_every):
            optimizer.zero_grad()
            block: AbstractContextManager[None] = balancer.step() if is_balanced else nullcontext()
            with block:
                pipeline.step(x, target=x)
            optimizer.step()
        dist.barrier()
        return time.perf_counter() - begin

    window(True), window(False)
    pairs = [(window(True), window(False)) for _ in range(options.pairs)]
    again = [(window(False), window(False)) for _ in range(options.pairs)]
    if dist.get_rank() == 0:
        ratios, noise = ([one / other for one, other in found] for found in (pairs, again))
        step_s = statistics.median(other for _, other in pairs) / options.profile_every
        print(f"a step without balancing: {1e3 * step_s:.1f} ms; a profile every {options.profile_every} steps")
        print(describe_ratio("balanced / not", ratios))
        print(describe_ratio("not / not", noise))
        save("pipeline_overhead", {"step_s": step_s, "ratios": ratios, "noise": noise} | vars(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
