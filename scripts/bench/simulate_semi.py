"""Who should migrate, by simulation: python -m scripts.bench.simulate_semi --chi 8 6 4 2 1 1 1 1

SEMI by both rules on a model of a cluster, with every number λ of migrating stragglers and with its own choice
(Fig. 11): the step time as a ratio to the homogeneous one, what is dropped and what is lent. Is the choice the best λ?
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from scripts.bench.measured_cost import COST
from scripts.simulated.training import Cluster, simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig, PaperConfig
from zeroresize.policy.tensor.costs import MigrationCost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chi", type=float, nargs="+", default=[8, 6, 4, 2, 1, 1, 1, 1], help="of every rank")
    parser.add_argument("--rest", type=float, default=0.2, help="share of a homogeneous step that is no product")
    parser.add_argument("--fixed", type=float, default=0.01, help="what a loan costs, in homogeneous steps")
    parser.add_argument("--per-share", type=float, default=0.05, help="and all of a rank's columns")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    migration = MigrationCost(arguments.fixed, arguments.per_share)

    def cluster(chis: list[float]) -> Cluster:
        return Cluster(
            lambda step: chis, arguments.rest, 1 - arguments.rest, COST, migration=migration, noise=arguments.noise
        )

    homogeneous_s = statistics.fmean(unbalanced_step_s(cluster([1.0] * len(arguments.chi)), arguments.steps))
    table = Table("rule", "λ", "step / homogeneous", "dropped", "lent", title_justify="left",
                  title=f"χ = {arguments.chi}, after the first 60 steps")  # fmt: skip
    num_stragglers = sum(chi > 1 for chi in arguments.chi)
    for rule in ("makespan", "paper"):
        for choice in (*range(num_stragglers + 1), "auto"):
            config = BalanceConfig(mode="semi", paper=PaperConfig(semi_rule=rule, num_migrating=choice))
            run = simulate(config, cluster(arguments.chi), arguments.steps)
            step = statistics.fmean(run.step_s[60:]) / homogeneous_s
            num_migrating = sum(share > 0 for share in run.lent[-1])
            name = f"its own choice: {num_migrating}" if choice == "auto" else str(choice)
            table.add_row(rule, name, f"{step:.3f}", f"{statistics.fmean(run.ratios[-1]):.3f}",
                          f"{statistics.fmean(run.lent[-1]):.3f}")  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
