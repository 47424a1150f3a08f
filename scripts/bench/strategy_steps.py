"""Steps on long-tailed lengths: torchrun --standalone --nproc-per-node 4 -m scripts.bench.strategy_steps

A LLaMA-like model on four ranks, and mini-batches whose lengths are distributed as in CommonCrawl or on GitHub
(``lm_examples.length_distributions``), scaled so that the longest is as long as allowed. A rank's memory is
taken to hold the activations of ``--tokens`` tokens of an undivided model, so of tp times as many of a divided one: the
longest sequences need tp = 4, and the only static strategy is (1, 4, 1). Combinations train the same mini-batches in
turns; ratios are paired by mini-batch. "If memory sufficed" is what (4, 1, 1) would do. This is the real counterpart of
the slides' Table 3.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lm_examples.length_distributions import DISTRIBUTIONS
from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from scripts.bench.common import bootstrap_interval, machine, save
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.step_report import StepReport
from zeroresize.strategy.trainer import StrategyTrainer

DP4, DP2_TP2, TP4 = Strategy(4, 1, 1), Strategy(2, 2, 1), Strategy(1, 4, 1)


def combinations(tokens: int) -> dict[str, list[LengthRange]]:
    """Ranges whose micro-batches fit into the memory that is assumed."""
    dp4, dp2, tp4 = (LengthRange(tp * tokens, one, tp * tokens) for tp, one in ((1, DP4), (2, DP2_TP2), (4, TP4)))
    return {
        "static (1, 4, 1)": [tp4],
        "C1: (4, 1, 1), (1, 4, 1)": [dp4, tp4],
        "C2: (2, 2, 1), (1, 4, 1)": [dp2, tp4],
        "C3: (4, 1, 1), (2, 2, 1), (1, 4, 1)": [dp4, dp2, tp4],
        "if memory sufficed: (4, 1, 1)": [LengthRange(4 * tokens, DP4, 4 * tokens)],
    }


def mini_batch(
    name: str, num_tokens: int, longest: int, vocabulary: int, generator: np.random.Generator
) -> list[Tensor]:
    """Sequences of so many tokens together, at least, with lengths as the distribution has them."""
    lengths = DISTRIBUTIONS[name].mini_batch(num_tokens, longest, generator)
    return [torch.from_numpy(generator.integers(vocabulary, size=length + 1)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument(
        "--tokens", type=int, default=512, help="of which a rank holds an undivided model's activations"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of a mini-batch, at least")
    parser.add_argument("--batches", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(num_blocks=arguments.blocks, hidden_size=arguments.hidden, num_heads=8)
    model = SwitchableModel(
        llama_layers(config), strategies=[TP4, DP2_TP2, DP4], process_group=dist.group.WORLD, optimizer_strategy=TP4
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainers = {
        name: StrategyTrainer(model, optimizer, ranges, loss=token_loss)
        for name, ranges in combinations(arguments.tokens).items()
    }
    console, result = Console(width=140), {}
    for data in DISTRIBUTIONS:
        generator = np.random.default_rng(0)
        reports: dict[str, list[StepReport]] = {name: [] for name in trainers}
        for number in range(arguments.batches + 1):
            sequences = mini_batch(data, arguments.batch_tokens, 4 * arguments.tokens, config.vocabulary, generator)
            for name, trainer in trainers.items():
                report = trainer.step(sequences)
                if number:  # the first one plans and warms up
                    reports[name].append(report)
        result[data] = figures_of = {name: figures(own, reports["static (1, 4, 1)"]) for name, own in reports.items()}
        if dist.get_rank() == 0:
            show(console, data, figures_of)
    if dist.get_rank() == 0:
        console.print(machine())
        save("strategy_steps", {"arguments": vars(arguments), **result})
    dist.destroy_process_group()


def figures(reports: list[StepReport], static: list[StepReport]) -> dict[str, object]:
    """Medians of a combination's steps, and how many times as fast as the static ones they are."""
    speedups = [before.seconds / report.seconds for before, report in zip(static, reports, strict=True)]
    by_strategy: dict[str, list[float]] = {}
    for report in reports:
        for timed_range in report.by_range:
            name = f"{timed_range.strategy} up to {timed_range.up_to[-1]}"
            by_strategy.setdefault(name, []).append(timed_range.seconds)
    return {
        "step_s": statistics.median(report.seconds for report in reports),
        "switch_s": statistics.median(sum(switch.seconds for switch in report.switches) for report in reports),
        "ranges_s": {name: statistics.median(values) for name, values in by_strategy.items()},
        "tokens": statistics.mean(report.num_tokens for report in reports),
        "speedup": statistics.median(speedups),
        "interval": bootstrap_interval(speedups),
    }


def show(console: Console, data: str, figures_of: dict[str, dict[str, object]]) -> None:
    table = Table("", "step", "of it switches", "speedup [95 %]", "ranges", title=data, title_justify="left")
    for name, row in figures_of.items():
        low, high = row["interval"]
        ranges = "; ".join(f"{strategy} {seconds:.2f} s" for strategy, seconds in row["ranges_s"].items())
        table.add_row(
            name,
            f"{row['step_s']:.2f} s",
            f"{row['switch_s']:.2f} s",
            f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]",
            ranges,
        )
    console.print(table)


if __name__ == "__main__":
    main()
