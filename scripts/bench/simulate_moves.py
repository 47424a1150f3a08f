"""When moving ownership pays, by simulation: python -m scripts.bench.simulate_moves --ranks 8 --chi 4

One straggler that is another rank every so many steps, and three policies: never moving (a straggler lends), always
moving (as soon as anybody is slow, as if moves were free) and the controller's. For every cost of a move: seconds of a
step as a ratio to a homogeneous one, how many moves there were, and from which turn on moving wins.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.measured_cost import REST_SHARE
from scripts.simulated.training import Cluster, Simulation, simulate
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost

#: So fine that whole units are no matter; a feed-forward part and one of heads.
_SEGMENTS = (SegmentWork(16384, 8, 0.65), SegmentWork(4096, 1, 0.35))
_NUM_TURNS = 16
_POLICIES = ("never", "always", "ours")


def run(arguments: argparse.Namespace, every: int, move: MoveCost, policy: str) -> Simulation:
    """One policy; the straggler changes every ``every`` steps."""

    def chi(step: int) -> list[float]:
        return [arguments.chi if step // every % arguments.ranks == rank else 1.0 for rank in range(arguments.ranks)]

    cluster = Cluster(
        chi,
        REST_SHARE,
        1.0 - REST_SHARE,
        ResizingCost.linear(0.9),
        migration=MigrationCost(arguments.fixed, arguments.per_share),
        noise=arguments.noise,
        segments=_SEGMENTS,
        bytes_of_units=1.0,
        move=move,
    )
    believed: dict[str, Any] = {"believed_move": MoveCost(0.0, 0.0), "learns_moves": False}
    config = BalanceConfig(mode="exact", moves=policy != "never", update_every=arguments.update_every)
    num_steps = max(_NUM_TURNS * every, 1600)
    return simulate(config, cluster, num_steps, **(believed if policy == "always" else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--chi", type=float, default=4.0, help="of the straggler")
    parser.add_argument("--every", type=int, nargs="+", default=[5, 20, 80, 320], help="steps until it is another rank")
    parser.add_argument(
        "--costs", type=float, nargs="+", default=[1, 5, 20, 80],
        help="what moving all units of a rank takes, there and back, in homogeneous steps",
    )  # fmt: skip
    parser.add_argument("--fixed", type=float, default=0.01, help="what a loan costs, in homogeneous steps")
    parser.add_argument("--per-share", type=float, default=0.05, help="and all of a rank's columns")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--update-every", type=int, default=10)
    arguments = parser.parse_args()

    table = Table("there and back", "turn", *_POLICIES, "moves always", "moves ours", "above the better",
                  title=f"χ = {arguments.chi:g}, another of {arguments.ranks} ranks every so many steps: "
                  "step / homogeneous", title_justify="left")  # fmt: skip
    break_even = {}
    for cost in arguments.costs:
        wins = []
        for every in arguments.every:
            runs = {policy: run(arguments, every, MoveCost(cost / 2, 0.0), policy) for policy in _POLICIES}
            steps = {policy: statistics.fmean(own.step_s) for policy, own in runs.items()}
            if steps["always"] < steps["never"]:
                wins.append(every)
            better = min(steps["never"], steps["always"])
            table.add_row(
                f"{cost:g} steps", str(every), *(f"{steps[policy]:.3f}" for policy in _POLICIES),
                str(len(runs["always"].moves)), str(len(runs["ours"].moves)), f"{steps['ours'] / better - 1:+.1%}",
            )  # fmt: skip
        break_even[cost] = min(wins, default=None)
    console = Console(width=120)
    console.print(table)
    for cost, every in break_even.items():
        since = f"from turns of {every} steps on" if every is not None else "in none of these turns"
        console.print(f"a move of {cost:g} steps there and back: always moving beats never moving {since}")


if __name__ == "__main__":
    main()
