"""When moving pays for stragglers that take turns: torchrun --nproc-per-node 2 -m scripts.bench.turns

Copies of a ViT under Colossal-AI train in the same processes; each rank in turn sleeps after its multiplications, for
so many steps. *never* leaves the units where they are, *always* moves them by hand in the step in which the turn
changes, as nobody could know, *exact* is the default. Mean step of each (in brackets the median in the second halves
of the turns), as a ratio to a homogeneous one, and how much more than the better of the two the default took, in prices
of a move there and back.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks
from scripts.bench.common import save, slowness_of
from scripts.bench.solutions import Copy
from vit_examples.config import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chi", type=float, default=4.0)
    parser.add_argument("--every", type=int, nargs="+", default=[5, 20, 80, 320], help="steps of a turn")
    parser.add_argument("--turns", type=int, nargs="+", default=[16, 6, 4, 2], help="how many turns of each length")
    parser.add_argument("--update-every", type=int, default=5)
    arguments = parser.parse_args()
    ranks = ColossalAIRanks()
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=12)
    copies: dict[str, Copy] = {}
    for name, mode in (("never", "off"), ("always", "off"), ("exact", "exact")):
        trainer = ranks.trainer(shape, batch_size=arguments.batch)
        balancer = ranks.balance(trainer, zr.BalanceConfig(mode=mode, update_every=arguments.update_every))
        slowness = slowness_of(trainer.model)
        slowness.__enter__()
        copies[name] = Copy(trainer, balancer, slowness)
        copies[name].updates(3)
    homogeneous_s = statistics.median(step.seconds for step in copies["never"].updates(6))
    fast = tuple(1.0 / arguments.chi if rank == 0 else 1.0 for rank in range(ranks.num_ranks))
    moved_s = []
    table = Table("steps of a turn", "never", "always", "exact", "moves", "excess, in prices of a move")
    rows = []
    for every, turns in zip(arguments.every, arguments.turns, strict=True):
        seconds: dict[str, float] = {}
        settled: dict[str, float] = {}
        for name, copy in copies.items():
            total_s, num_moves, late_steps = 0.0, 0, []
            for turn in range(turns):
                slow = turn % ranks.num_ranks
                copy.slowness.chi = arguments.chi if ranks.rank == slow else 1.0
                if name == "always":
                    dist.barrier()
                    begin = time.perf_counter()
                    copy.balancer.move([*fast[-slow:], *fast[:-slow]] if slow else fast)
                    moved_s.append(time.perf_counter() - begin)
                    total_s += moved_s[-1]
                for step in range(every):
                    owned = copy.balancer.plan.owned
                    step_s = copy.timed_step().seconds
                    total_s += step_s
                    late_steps += [step_s] if 2 * step >= every else []
                    num_moves += copy.balancer.plan.owned != owned
            seconds[name] = total_s / (turns * every)
            settled[name] = statistics.median(late_steps)
            copy.slowness.chi = 1.0
            if name == "always":
                copy.balancer.move([1.0] * ranks.num_ranks)
            copy.updates(6)
        price_s = 2.0 * statistics.median(moved_s)
        excess_s = (seconds["exact"] - min(seconds["never"], seconds["always"])) * turns * every
        table.add_row(
            str(every),
            *(f"{seconds[name] / homogeneous_s:.3f} ({settled[name] / homogeneous_s:.3f})" for name in seconds),
            str(num_moves),
            f"{excess_s / price_s:.2f} in {turns} turns",
        )  # fmt: skip
        rows.append(
            {
                "every": every, "turns": turns, "seconds": seconds, "settled": settled, "moves": num_moves,
                "price_s": price_s,
            }
        )  # fmt: skip
    if ranks.rank == 0:
        Console(width=120).print(table)
        print(f"homogeneous {1e3 * homogeneous_s:.0f} ms, a move {1e3 * statistics.median(moved_s):.0f} ms")
        save(f"turns_h{arguments.hidden}", {"arguments": vars(arguments), "homogeneous_s": homogeneous_s, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
