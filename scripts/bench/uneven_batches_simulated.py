"""Batches divided by speed, simulated by the decisions of training: python -m scripts.bench.uneven_batches_simulated

Four ranks, or ``--ranks``; a step takes a second while nobody is slow, of which a tenth, or ``--fixed``, is the same
for any number of samples. Rows: nobody slow, with noise; the last rank slow from step 100 on, for ever; each in turn,
χ = 4; and random spells, whose lengths have Pareto's distribution of that exponent, so short that a change hardly ever
pays, or longer.
*Of off*: a mean step, of that of even batches with the same noise: the mean over the seeds, and the worst. *Removed*:
of what the best division of each step would have taken off. ``--change`` is what a change takes, in steps, as where
code is compiled anew.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator

import numpy as np

from scripts.bench.common import parser_of, run, save, show
from scripts.simulated.batches import BatchCluster, BatchTrace, in_turn, simulate_batches, spells
from scripts.simulated.noise import Noise
from zeroresize.policy.data.division import Floats

NOISES = {
    "1 %": Noise(0.01),
    "5 %": Noise(0.05),
    "correlated 2 %": Noise(0.02, correlation=0.9),
    "hiccups": Noise(0.01, burst_rate=0.02, burst_steps=1, burst_factors=(1.5, 4.0)),
}


def removed(cluster: BatchCluster, chis: Floats, trace: BatchTrace) -> float:
    """Share of what the best division of each step takes off, without noise; 1 where that is nothing."""
    even = trace.counts[0]
    times = [
        [cluster.busy_s(counts, chi).max() for counts in (even, now, cluster.best(chi))]
        for chi, now in zip(chis, trace.counts, strict=True)
    ]
    off_s, now_s, best_s = np.array(times).sum(axis=0)
    return float((off_s - now_s) / (off_s - best_s)) if off_s > 1.001 * best_s else 1.0


def main() -> None:
    sizes = {"steps": 6000, "seeds": 5, "ranks": 4, "batch_of_rank": 64, "every": 10, "ahead": 4}
    parser = parser_of(__doc__, **sizes, change=0.0, fixed=0.1)
    options = parser.parse_args()
    shape = options.steps, options.ranks

    def slow(chi: float) -> Callable[[int], Floats]:
        def of_seed(seed: int) -> Floats:
            chis = np.ones(shape)
            chis[100:, -1] = chi
            return chis

        return of_seed

    def cases() -> Iterator[tuple[str, str, Callable[[int], Floats]]]:
        yield from (("nobody slow", noise, slow(1.0)) for noise in NOISES)
        yield from ((f"χ={chi:g}", "1 %", slow(chi)) for chi in (1.3, 2.0, 4.0))
        for spell in (10, 20, 40, 80):
            yield f"each in turn, {spell} steps", "1 %", lambda seed, spell=spell: in_turn(*shape, spell)
        for least, exponent in itertools.product((5, 20, 100), (1.1, 3.0)):
            chis_of = functools.partial(spells, *shape, least=least, exponent=exponent)
            yield f"spells of {least} steps and more, {exponent:g}", "1 %", chis_of

    table, results = [], []
    for case, noise, chis_of in cases():
        ratios, shares, changes = [], [], []
        for seed in range(options.seeds):
            cluster = BatchCluster(
                options.ranks,
                options.ranks * options.batch_of_rank,
                noise=NOISES[noise],
                ahead=options.ahead,
                change_s=options.change,
                fixed_s=options.fixed,
                seed=seed,
            )
            chis = chis_of(seed)
            trace = simulate_batches(cluster, chis, update_every=options.every)
            ratios.append(trace.per_off)
            shares.append(removed(cluster, chis, trace))
            changes.append(trace.num_changes)
        figures = statistics.fmean(ratios), max(ratios), statistics.fmean(shares), statistics.fmean(changes)
        results.append({"case": case, "noise": noise, "of_off": ratios, "removed": shares, "changes": changes})
        table.append([case, noise, *(f"{each:.3f}" for each in figures[:3]), f"{figures[3]:.1f}"])
    show("", ["case", "noise", "of off", "worst", "removed", "changes"], table)
    save("uneven_batches_simulated", {**vars(options), "rows": results})


if __name__ == "__main__":
    run(main)
