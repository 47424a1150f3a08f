"""A rank that really is slow: torchrun --standalone --nproc-per-node 4 -m scripts.bench.strategy_slowness

Blocks that sleep by tokens and units (``paced_layers``) train under two strategies on four ranks. One rank takes χ
times as long for some steps, and recovers. Three trainings make the same steps in turns: nothing is done;
``StrategyBalancer`` decides, its changes counted as a part of the step; and an oracle has in each phase what is best in
hindsight, changed between two steps for nothing. Of what it saves, how much does the balancer save?
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lm_examples.llama import token_loss
from scripts.bench.common import bootstrap_interval, machine, save, time_slowest_rank
from scripts.bench.paced_layers import Pace, paced_cost_model, paced_layers, sequences_of
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.stragglers.costs import StragglerCosts
from zeroresize.policy.strategy.stragglers.decision import StragglerDecision
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.strategy_balancer import StrategyBalancer
from zeroresize.strategy.trainer import StrategyTrainer

RANGES = [LengthRange(6, Strategy(2, 2)), LengthRange(16, Strategy(1, 4))]
NUM_BLOCKS, MAX_TOKENS, SLOW_RANK = 4, 32, 1
PHASES = ("quiet", "slow", "recovered")


def mini_batch(step: int) -> list[Tensor]:
    """Four short sequences, 20 tokens together, and a long one."""
    first, second, long = torch.randint(0, 4, (3,), generator=torch.Generator().manual_seed(step)).tolist()
    return sequences_of([3 + first, 6 - first, 3 + second, 6 - second, 13 + long], step)


def trainer_of(pace: Pace) -> StrategyTrainer:
    strategies = [one.strategy for one in RANGES]
    model = SwitchableModel(paced_layers(NUM_BLOCKS, pace), strategies=strategies, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=1e-2)
    return StrategyTrainer(model, optimizer, RANGES, loss=token_loss, max_tokens=MAX_TOKENS)


def best_strategies(trainer: StrategyTrainer, token_s: float, speeds: Sequence[float]) -> tuple[Strategy, ...]:
    """Return those with the shortest expected steps of all candidates, at speeds that are known."""
    cost = paced_cost_model(trainer.model.tensors, NUM_BLOCKS, token_s, len(speeds))
    costs = StragglerCosts(cost, trainer.ranges, optimizer_strategy=0)
    costs.expect([[len(one) - 1 for one in mini_batch(step)] for step in range(4)])
    proposals = StragglerDecision([one.strategy for one in RANGES], costs.division, costs).what_if(speeds)
    return min(proposals, key=lambda one: one.step_s).candidate.strategies


def run(chi: float, num_steps: dict[str, int], token_s: float) -> dict[str, object]:
    """Return seconds of each training's steps by phase, and what was decided."""
    pace = Pace(token_s, sleeps=True)
    nothing, balanced, oracle = (trainer_of(pace) for _ in range(3))
    decided: list[str] = []
    cost = paced_cost_model(balanced.model.tensors, NUM_BLOCKS, token_s, dist.get_world_size())
    balancer = StrategyBalancer(
        balanced,
        cost,
        probe=pace.probe,
        on_change=lambda one: decided.append(f"{one.what} after step {one.step}, {one.switch_s:.2f} s"),
    )
    steps: dict[str, Callable[[list[Tensor]], object]] = {
        "nothing": nothing.step,
        "balancer": balancer.step,
        "oracle": oracle.step,
    }
    seconds: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in steps} for phase in PHASES}
    for name in steps:
        steps[name](mini_batch(0))  # plans, and warms up
    slow_speeds = [1.0 / chi if rank == SLOW_RANK else 1.0 for rank in range(dist.get_world_size())]
    original, best = [one.strategy for one in RANGES], best_strategies(oracle, token_s, slow_speeds)
    number = 0
    for phase in PHASES:
        wanted = best if phase == "slow" else original
        oracle.change_strategies(wanted, wanted[0])
        pace.chi = chi if phase == "slow" and dist.get_rank() == SLOW_RANK else 1.0
        for _ in range(num_steps[phase]):
            number += 1
            sequences = mini_batch(number)
            for name, step in steps.items():
                seconds[phase][name].append(time_slowest_rank(lambda step=step, rows=sequences: step(rows)))
    balancer.close()
    return {"seconds": seconds, "decided": decided, "oracle": list(map(str, best))}


def figures(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Ratios of a phase, paired by step, and of what the oracle saves the share that the balancer saves."""
    total = {name: sum(own) for name, own in seconds.items()}
    ratios = {
        name: [before / after for before, after in zip(seconds["nothing"], steps_s, strict=True)]
        for name, steps_s in seconds.items()
    }
    return {
        "step_s": {name: statistics.median(own) for name, own in seconds.items()},
        "total_s": total,
        "speedup": {name: total["nothing"] / total[name] for name in total},
        "median_speedup": {name: statistics.median(own) for name, own in ratios.items()},
        "interval": {name: bootstrap_interval(own) for name, own in ratios.items()},
        "share": (total["nothing"] - total["balancer"]) / (total["nothing"] - total["oracle"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--steps", type=int, nargs=3, default=[12, 30, 30], help="of each phase")
    parser.add_argument("--token-ms", type=float, default=6.0, help="of a token in a whole block, forward and backward")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    console, result = Console(width=160), {}
    for chi in options.chi:
        outcome = run(chi, dict(zip(PHASES, options.steps, strict=True)), 1e-3 * options.token_ms)
        by_phase = {phase: figures(seconds) for phase, seconds in outcome["seconds"].items()}
        result[f"{chi:g}"] = {**by_phase, "decided": outcome["decided"], "oracle": outcome["oracle"]}
        if dist.get_rank() == 0:
            show(console, chi, result[f"{chi:g}"])
    if dist.get_rank() == 0:
        console.print(machine())
        save("strategy_slowness", {"arguments": vars(options), "by_chi": result})
    dist.destroy_process_group()


def show(console: Console, chi: float, result: dict[str, object]) -> None:
    title = f"χ = {chi:g}: {'; '.join(result['decided']) or 'nothing decided'}"
    table = Table(
        "", "nothing: a step", "balancer: all steps", "a step [95 %]", "oracle", "of the removable", title=title
    )
    for phase in PHASES:
        row = result[phase]
        low, high = row["interval"]["balancer"]
        table.add_row(
            phase,
            f"{row['step_s']['nothing']:.3f} s",
            f"{row['speedup']['balancer']:.2f}",
            f"{row['median_speedup']['balancer']:.2f} [{low:.2f}, {high:.2f}]",
            f"{row['speedup']['oracle']:.2f}",
            f"{row['share']:.0%}" if phase == "slow" else "",
        )
    table.caption = f"oracle: {', '.join(result['oracle'])}"
    console.print(table)


if __name__ == "__main__":
    main()
