"""One slow GPU of 32 under switched strategies, simulated: python -m scripts.bench.strategy_stragglers

A LLaMA-like model of 32B on 4 nodes of 8 GPUs, the slides' combination C2 (HotSPa), long-tailed lengths. One GPU is χ
times slower for a part of the steps. Nothing is done; units move inside the tensor-parallel groups; the GPU is left
out; or the best of everything is chosen.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from lm_examples.length_distributions import DISTRIBUTIONS
from scripts.bench.strategy_tables import COMBINATIONS, K
from scripts.simulated.llama_tensors import LLAMA_32B
from scripts.simulated.strategies import GpuCluster, llama_cost_model
from scripts.simulated.strategy_stragglers import simulate_stragglers
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.strategy.stragglers.changed_strategies import Kind
from zeroresize.policy.strategy.stragglers.costs import StragglerCosts
from zeroresize.policy.strategy.stragglers.decision import StragglerDecision

MODES: dict[str, tuple[Kind, ...]] = {
    "nothing": (),
    "shares only": ("shares",),
    "leaving out only": ("leave out",),
    "all": ("shares", "rearrange", "leave out"),
}
SLOW_RANK = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="the GPU is slow in the middle third of them")
    parser.add_argument("--tokens", type=int, default=500_000, help="of a mini-batch")
    parser.add_argument("--batches", type=int, default=4, help="mini-batches that a step is the mean of")
    parser.add_argument("--limit-gb", type=float, default=80.0, help="memory of a GPU")
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    options = parser.parse_args()
    cluster = GpuCluster()
    cost = llama_cost_model(LLAMA_32B, cluster, (1, 2, 4, 8, 16, 32))
    ranges = [LengthRange(up_to, Strategy(*degrees)) for up_to, degrees in COMBINATIONS["C2"]]
    lengths, random = DISTRIBUTIONS["commoncrawl"], np.random.default_rng(0)
    sample = [lengths.mini_batch(options.tokens, ranges[-1].up_to, random) for _ in range(options.batches)]
    costs = StragglerCosts(cost, ranges, optimizer_strategy=len(ranges) - 1, limit_bytes=options.limit_gb * 1e9)
    costs.expect(sample)
    even = (1.0,) * cluster.num_gpus
    table = Table(title=f"C2, {options.tokens / K:.0f}K tokens a step, one of 32 GPUs slow in the middle third")
    for name in ("χ", "may be done", "steps and switches [s]", "slow step before, last [s]", "decided (after step)"):
        table.add_column(name, overflow="fold")
    third = options.steps // 3
    for chi in options.chi:
        slow = tuple(1.0 / chi if rank == SLOW_RANK else 1.0 for rank in range(cluster.num_gpus))
        speeds = [even] * third + [slow] * third + [even] * (options.steps - 2 * third)
        for name, kinds in MODES.items():
            price = MoveCost(1.0 / cluster.between_bytes_per_s, 0.05, setup_s=0.2)
            strategies = [one.strategy for one in ranges]
            decision = StragglerDecision(strategies, costs.division, costs, cost=price, kinds=kinds)
            run = simulate_stragglers(decision, costs, speeds, delay=2)
            decided = "; ".join(f"{what} ({step}, {own_s:.1f} s)" for step, what, own_s in run.switches)
            last_s = f"{run.steps_s[third]:.1f}, {run.steps_s[2 * third - 1]:.1f}"
            table.add_row(f"{chi:g}", name, f"{run.seconds:.0f}", last_s, decided or "nothing")
    table.caption = f"a step while all are equally fast: {costs.step_s([one.strategy for one in ranges], even):.1f} s"
    Console().print(table)


if __name__ == "__main__":
    main()
