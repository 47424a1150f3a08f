"""The slides' Table 3 (HotSPa), simulated: python -m scripts.bench.strategy_tables

A LLaMA-like model of 32B on 4 nodes of 8 GPUs, a context of 32K: one static strategy, the slides' combinations C1 to
C3, and the one that the search finds, each in the cheapest strategy of the optimizer that fits.

The tokens of each range are shared out as the table's column "Static" is, and a mini-batch has as many as take a
static strategy that column's total. Switches are those of mixed precision that overlap with training: weights in 16
bits, and gradients, which are held in 32 bits, too. The bandwidth between nodes, of which the slides say nothing, is
fitted once to the six totals of C1 to C3 (--fit); nothing else is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lm_examples.length_distributions import DISTRIBUTIONS
from scripts.bench.common import save
from scripts.simulated.llama_tensors import LLAMA_32B
from scripts.simulated.strategies import (
    GpuCluster,
    llama_cost_model,
    padded_rows,
)
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.candidate_strategies import candidate_strategies
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.forecast import Pack, StepForecast, forecast_step, packed_by_work
from zeroresize.policy.strategy.costs.overlap import OverlappedSwitches
from zeroresize.policy.strategy.costs.search import SearchResult, search_strategies

K = 1024
#: Where the rows of the table end.
EDGES = (1 * K, 4 * K, 8 * K, 16 * K, 32 * K)
STATIC = ((32 * K, (1, 16, 2)),)
COMBINATIONS = {
    "C1": ((4 * K, (4, 2, 4)), (16 * K, (2, 8, 2)), (32 * K, (1, 16, 2))),
    "C2": ((4 * K, (4, 2, 4)), (8 * K, (4, 4, 2)), (16 * K, (2, 8, 2)), (32 * K, (1, 16, 2))),
    "C3": ((1 * K, (8, 4, 1)), (4 * K, (4, 2, 4)), (8 * K, (4, 4, 2)), (16 * K, (2, 8, 2)), (32 * K, (1, 16, 2))),
}
#: Table 3, seconds: the column Static by range, then of each combination its ranges, Others and Total.
PAPER_STATIC = {"CommonCrawl": DISTRIBUTIONS["commoncrawl"].tokens, "GitHub": DISTRIBUTIONS["github"].tokens}
PAPER = {
    "CommonCrawl": {
        "C1": ((22.7, 5.4, None), 1.8, 32.3),  # the text of the slides has no figure for the last range
        "C2": ((22.7, None, 2.2, 2.4), 3.5, 33.5),
        "C3": ((12.8, 8.2, 2.7, 2.2, 2.4), 4.9, 33.2),
    },
    "GitHub": {
        "C1": ((26.3, 37.4, 53.0), 1.8, 118.5),
        "C2": ((26.3, 15.4, 20.2, 53.0), 3.5, 118.4),
        "C3": ((8.6, 17.1, 15.4, 20.2, 53.0), 4.9, 119.2),
    },
}
PACKS: dict[str, Pack] = {"padded rows": padded_rows, "sequences apart": packed_by_work}


def ranges_of(combination: Sequence[tuple[int, tuple[int, int, int]]]) -> list[LengthRange]:
    return [LengthRange(up_to, Strategy(*degrees)) for up_to, degrees in combination]


class Memory:
    """Tells what fits into the GPUs' memory, of the static strategy, C1 to C3 and the searched ranges alike."""

    def __init__(self, cost: CostModel, limit: float) -> None:
        self.limit, self._cost = limit, cost
        self._overlapped: dict[Strategy, OverlappedSwitches] = {}

    def overlapped(self, optimizer_strategy: Strategy) -> OverlappedSwitches:
        """Switches beside training, of gradients that are held in 32 bits and travel between nodes in 16."""
        if optimizer_strategy not in self._overlapped:
            self._overlapped[optimizer_strategy] = OverlappedSwitches(
                self._cost, optimizer_strategy, gradient_ratio=2.0, gradient_itemsize=2, limit_bytes=self.limit
            )
        return self._overlapped[optimizer_strategy]

    def fits(self, strategy: Strategy, optimizer_strategy: Strategy, tokens: int) -> bool:
        return self.overlapped(optimizer_strategy).fits(strategy, tokens)

    def fits_all(self, ranges: Sequence[LengthRange], optimizer_strategy: Strategy) -> bool:
        return all(self.fits(own.strategy, optimizer_strategy, own.max_tokens or own.up_to) for own in ranges)

    def require(self, ranges: Sequence[LengthRange], optimizer_strategies: Sequence[Strategy]) -> list[Strategy]:
        """The strategies of the optimizer with which all of these ranges fit.

        Raises:
            ValueError: if there is none.
        """
        fitting = [strategy for strategy in optimizer_strategies if self.fits_all(ranges, strategy)]
        if not fitting:
            raise ValueError(
                f"{[str(own) for own in ranges]} need more than {self.limit:g} bytes a rank with the optimizer in any "
                f"of {[str(strategy) for strategy in optimizer_strategies]}"
            )
        return fitting


def in_best_optimizer_strategy(
    ranges: Sequence[LengthRange],
    sample: Sequence[Sequence[int]],
    cost: CostModel,
    pack: Pack,
    memory: Memory,
    optimizer_strategies: Sequence[Strategy] = (),
) -> StepForecast:
    """A step with these ranges in that strategy of the optimizer, of those that fit, with which it takes least.

    Args:
        optimizer_strategies: to choose from; empty for the ranges' own.

    Raises:
        ValueError: if they fit in none.
    """
    given = list(optimizer_strategies) or list(dict.fromkeys(own.strategy for own in ranges))
    forecasts = [
        forecast_step(ranges, optimizer_strategy, sample, cost, pack, overlap=memory.overlapped(optimizer_strategy))
        for optimizer_strategy in memory.require(ranges, given)
    ]
    return min(forecasts, key=lambda forecast: forecast.step_s)


def searched(sample: Sequence[Sequence[int]], cost: CostModel, pack: Pack, memory: Memory) -> SearchResult:
    """The search over all strategies of which one can hold the model at all."""
    every = candidate_strategies(cost.num_ranks, cost.layers.num_layers, [64, 17920], ranks_per_node=8)
    candidates = [
        strategy
        for strategy in every
        if any(memory.fits(strategy, optimizer_strategy, EDGES[0]) for optimizer_strategy in every)
    ]
    return search_strategies(
        sample,
        candidates,
        cost,
        memory_limit=memory.limit,
        thresholds=EDGES,
        pack=pack,
        max_ranges=len(EDGES),
        fits=memory.fits,
    )


def mini_batches(data: str, num_batches: int, cost: CostModel, pack: Pack) -> list[list[int]]:
    """Lengths, of as many tokens as take the static strategy what the column "Static" has in all."""
    (up_to, degrees), tokens, lengths = STATIC[0], 2**20, DISTRIBUTIONS[data.lower()]
    for _ in range(3):  # the pipeline's filling does not grow with the tokens
        drawn = lengths.mini_batch(tokens, up_to, np.random.default_rng(0))
        taken = cost.work_seconds(Strategy(*degrees), pack(drawn, up_to, degrees[0]))
        tokens = round(tokens * sum(lengths.tokens) / taken)
    random = np.random.default_rng(0)
    return [lengths.mini_batch(tokens, up_to, random) for _ in range(num_batches)]


def simulated(
    data: str, cost: CostModel, pack: Pack, memory: Memory, num_batches: int
) -> tuple[dict[str, StepForecast], dict[str, Any]]:
    """Forecasts of the static strategy, C1 to C3 and what the search finds; what there is to say of the lengths."""
    sample = mini_batches(data, num_batches, cost, pack)
    forecasts = {"Static": in_best_optimizer_strategy(ranges_of(STATIC), sample, cost, pack, memory)}
    for name, combination in COMBINATIONS.items():
        forecasts[name] = in_best_optimizer_strategy(ranges_of(combination), sample, cost, pack, memory)
    began = time.perf_counter()
    result = searched(sample, cost, pack, memory)
    drawn = np.concatenate(sample)
    tokens = np.bincount(np.searchsorted(EDGES, drawn), weights=drawn)
    lengths_in_numbers = {
        "token_shares": (tokens / tokens.sum()).round(4).tolist(),
        "tokens": float(tokens.sum()) / len(sample),
        "sequences": len(drawn) / len(sample),
        "search_s": time.perf_counter() - began,
        "num_visited": result.num_visited,
    }
    for name, forecast in (("best static", result.static), ("searched", result.best)):  # found without overlap
        forecasts[name] = in_best_optimizer_strategy(
            forecast.ranges, sample, cost, pack, memory, [forecast.optimizer_strategy]
        )
    return forecasts, lengths_in_numbers


def row_of(up_to: int, forecast: StepForecast) -> int | None:
    """The number of the range that ends with a row of the table."""
    ends = [own.up_to for own in forecast.ranges]
    return ends.index(up_to) if up_to in ends else None


def table_of(title: str, data: str, forecasts: dict[str, StepForecast], shares: Sequence[float]) -> Table:
    table = Table("", *forecasts, title=title, title_justify="left")
    static = PAPER_STATIC[data]

    def paper(seconds: float | None) -> str:
        return "" if seconds is None else f" [dim]({seconds:g})[/dim]"

    for number, up_to in enumerate(EDGES):
        cells = [f"{forecasts['Static'].range_s[0] * shares[number]:.1f}{paper(static[number])}"]
        for name in list(forecasts)[1:]:
            place = row_of(up_to, forecasts[name])
            figures = PAPER[data][name][0] if name in COMBINATIONS else None
            paper_s = paper(figures[place]) if figures and place is not None else ""
            strategy = forecasts[name].ranges[place].strategy if place is not None and not figures else ""
            cells.append("" if place is None else f"{forecasts[name].range_s[place]:.1f}{paper_s} {strategy}".rstrip())
        table.add_row(f"to {up_to // K}K", *cells)
    others = [paper(PAPER[data][name][1]) if name in COMBINATIONS else "" for name in forecasts]
    others_s = [one.switch_s + one.reduction_s for one in forecasts.values()]
    table.add_row("Others", *(f"{seconds:.2f}{beside}" for seconds, beside in zip(others_s, others, strict=True)))
    totals = [PAPER[data][name][2] if name in COMBINATIONS else None for name in forecasts]
    totals[0] = sum(static)
    pairs = zip(forecasts.values(), totals, strict=True)
    table.add_row("Total", *(f"{forecast.step_s:.1f}{paper(total)}" for forecast, total in pairs))
    gains = [f"{forecasts['Static'].step_s / one.step_s:.2f}×" for one in forecasts.values()]
    paper_gains = ["" if total is None else f" [dim]({sum(static) / total:.2f}×)[/dim]" for total in totals]
    table.add_row("speedup", *(f"{gain}{beside}" for gain, beside in zip(gains, paper_gains, strict=True)))
    table.add_row("optimizer's strategy", *(str(one.optimizer_strategy) for one in forecasts.values()))
    return table


def fit(efficiency: float, limit: float, num_batches: int) -> None:
    """Show by how much the totals differ from the slides' at several bandwidths between nodes."""
    names = [f"{data} {name}" for data in PAPER for name in COMBINATIONS]
    table = Table("GB/s", *names, "root mean square", title="totals beside the slides', sequences apart")
    for quarters in range(16, 29):
        between = quarters / 4
        cluster = GpuCluster(efficiency=efficiency, between_bytes_per_s=between * 1e9)
        cost, errors = llama_cost_model(LLAMA_32B, cluster, (1, 2, 4, 8, 16, 32)), []
        memory = Memory(cost, limit)
        for data, of_combinations in PAPER.items():
            sample = mini_batches(data, num_batches, cost, packed_by_work)
            for name, (_, _, total) in of_combinations.items():
                ranges = ranges_of(COMBINATIONS[name])
                forecast = in_best_optimizer_strategy(ranges, sample, cost, packed_by_work, memory)
                errors.append(forecast.step_s / total - 1.0)
        root = float(np.sqrt(np.mean(np.square(errors))))
        table.add_row(f"{between:g}", *(f"{error:+.1%}" for error in errors), f"{root:.1%}")
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--between", type=float, nargs="+", default=[25.0, 5.25], help="GB/s of a GPU between nodes")
    parser.add_argument("--fit", action="store_true", help="only tell which bandwidth suits the slides' totals best")
    parser.add_argument("--efficiency", type=float, default=0.5, help="share of the GPUs' peak that products reach")
    parser.add_argument("--memory", type=float, default=72.0, help="GB of a GPU for training; the rest is reserved")
    parser.add_argument("--packs", nargs="+", choices=list(PACKS), default=list(PACKS))
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    if options.fit:
        return fit(options.efficiency, options.memory * 1e9, options.batches)
    console, rows = Console(width=170), []
    for between in options.between:
        cluster = GpuCluster(efficiency=options.efficiency, between_bytes_per_s=between * 1e9)
        cost = llama_cost_model(LLAMA_32B, cluster, (1, 2, 4, 8, 16, 32))
        memory = Memory(cost, options.memory * 1e9)
        for pack in options.packs:
            for data in PAPER:
                by_name, lengths_in_numbers = simulated(data, cost, PACKS[pack], memory, options.batches)
                title = f"{data}, {pack}, {between:g} GB/s between nodes; seconds, in brackets the slides' figures"
                console.print(table_of(title, data, by_name, lengths_in_numbers["token_shares"]))
                console.print({key: value for key, value in lengths_in_numbers.items()})
                forecasts = {
                    name: {
                        "ranges": [own.as_dict() for own in forecast.ranges],
                        "optimizer_strategy": forecast.optimizer_strategy.as_dict(),
                        "range_s": forecast.range_s,
                        "others_s": forecast.switch_s + forecast.reduction_s,
                        "step_s": forecast.step_s,
                    }
                    for name, forecast in by_name.items()
                }
                row = {"data": data, "pack": pack, "between_gb_per_s": between}
                rows.append({**row, **lengths_in_numbers, "forecasts": forecasts})
    save("strategy_tables", {"efficiency": options.efficiency, "memory_gb": options.memory, "rows": rows})


if __name__ == "__main__":
    main()
