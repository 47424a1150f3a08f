"""What deciding costs every rank at an update, by the size of the group: python -m scripts.bench.decisions

No training and no processes: the table that an exchange brings is made up, with every second rank slow and all of them
noisy, and the CPU time of several updates is told, the least and the mean.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.measured_cost import COST, REST_SHARE
from zeroresize.config.keys import MODES
from zeroresize.control.group_decision import GroupDecision
from zeroresize.policy.tensor.costs import MigrationCost


def table_of(num_ranks: int, generator: random.Random) -> list[list[float]]:
    """Every rank's numbers as :class:`GroupDecision` sends them."""
    cost = [COST.borrowing, COST.widening, *COST.ratios, *COST.gemm_share, *COST.gather_fill_s]
    return [
        [
            0.0,
            0.01,
            REST_SHARE * generator.uniform(0.98, 1.02),
            (1.0 - REST_SHARE) * generator.uniform(0.98, 1.02) * (generator.uniform(1.5, 4.0) if rank % 2 else 1.0),
            1.0,
            0.01,
            0.2,
            0.0,
            *cost,
        ]
        for rank in range(num_ranks)
    ]


def cpu_ms(call: Callable[[], object]) -> float:
    """Milliseconds of this process's CPU."""
    began = time.process_time()
    call()
    return 1e3 * (time.process_time() - began)


def costs_of(mode: str, num_ranks: int, updates: int) -> dict[str, float]:
    """The least of an update's parts, and the mean that a decision took."""
    decision = GroupDecision(zr.BalanceConfig(mode=mode), num_ranks, None)
    decision.migration = MigrationCost(1e-5, 1e-3)
    generator = random.Random(0)
    least = {"decide": math.inf, "fingerprint": math.inf}
    decided_ms = []
    for update in range(updates + 3):  # the first few start lending
        table = table_of(num_ranks, generator)
        spent = {
            "decide": cpu_ms(lambda: decision._decide(table)),  # noqa: B023 - called at once
            "fingerprint": cpu_ms(lambda: decision._fingerprint((update, 0, [], False))),  # noqa: B023
        }
        if update >= 3:
            decided_ms.append(spent["decide"])
            least = {part: min(least[part], spent[part]) for part in least}
    return least | {"mean": statistics.fmean(decided_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--updates", type=int, default=12)
    arguments = parser.parse_args()
    table = Table("mode", "ranks", "decide, ms", "fingerprint, ms", "mean decide, ms")
    for num_ranks in arguments.ranks:
        for mode in MODES:
            least = costs_of(mode, num_ranks, arguments.updates)
            row = f"{least['decide']:.1f}", f"{least['fingerprint']:.2f}", f"{least['mean']:.1f}"
            table.add_row(mode, str(num_ranks), *row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
