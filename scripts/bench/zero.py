"""The closed loop against every fixed ratio: torchrun --nproc-per-node 2 -m scripts.bench.zero

One straggler (rank 1). Two copies of a ViT under Colossal-AI train in the same processes: one in mode "off", which with
and without the straggler gives Baseline and homogeneous, and one in ZERO-Rd, which is pinned to each ratio of a sweep
and let go for the closed loop. All take turns in short windows, so that a drift of the machine hits all alike. Before,
the straggler appears, and after, it recovers: how many updates until the ratio has settled, and until it is let go?

``--kind contend`` makes the straggler by real competitors for its core (they slow everything, and --chi 2 and 4 mean 1
and 3 of them) instead of a sleep after each matrix multiplication (scope "gemm", which slows those alone).
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks
from scripts.bench.common import gather_from_ranks, interval_of_ratio, save
from vit_examples.config import ModelConfig
from vit_examples.contention import Contention

STRAGGLER = 1


class ClosedLoopBench:
    """The two trainers, their stragglers, and the windows in which they take turns."""

    def __init__(
        self, ranks: ColossalAIRanks, shape: ModelConfig, batch_size: int, kind: str, config: zr.BalanceConfig
    ):
        self.ranks, self.config = ranks, config
        self.plain = ranks.trainer(shape, batch_size=batch_size)
        self.zero = ranks.trainer(shape, batch_size=batch_size)
        ranks.balance(self.plain, config.replace(mode="off"))
        self.balancer = ranks.balance(self.zero, config.replace(mode="zero-rd"))
        self.num_zero_steps = 0
        self.zero.after_step = self._after_zero_step
        self.slowness: list[Contention | zr.StragglerInjector] = (
            [Contention(core_index=ranks.rank)]  # which hits the whole process
            if kind == "contend"
            else [
                zr.StragglerInjector(trainer.model, process_group=ranks.group, chi={STRAGGLER: 1.0})
                for trainer in (self.plain, self.zero)
            ]
        )

    def set_chi(self, chi: float) -> None:
        for slowness in self.slowness:
            if isinstance(slowness, zr.StragglerInjector):
                slowness.set_chi({STRAGGLER: chi})
            elif self.ranks.rank == STRAGGLER:
                slowness.chi = chi

    def set_chi_at_update(self, chi: float) -> None:
        """Change the straggler's speed at the end of an update, so that updates can be counted from there."""
        while self.num_zero_steps % self.config.update_every:
            self.zero.step()
        self.set_chi(chi)

    def run_updates(self, num_updates: int) -> list[float]:
        """The closed loop alone: γ of the straggler after each update."""
        ratios = []
        for _ in range(num_updates):
            for _ in range(self.config.update_every):
                self.zero.step()
            ratios.append(self.balancer.plan.ranks[STRAGGLER].pruned)
        return ratios

    def _after_zero_step(self) -> None:
        self.balancer.step()
        self.num_zero_steps += 1

    def pinned(self, ratio: float | None, num_steps: int) -> list[float]:
        """A window of the ZERO trainer at a fixed ratio, or at the closed loop's for None."""
        if ratio is None:
            self.balancer.release()
        else:
            self.balancer.pin(STRAGGLER, ratio)
        try:
            return self.zero.window(num_steps)
        finally:
            self.balancer.release()


def compare(
    bench: ClosedLoopBench, chi: float, ratios: list[float], rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Seconds of the steps in every setting, all taking turns."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        settings: dict[str, Callable[[], list[float]]] = {
            "baseline": lambda: bench.plain.window(max(num_steps // 2, 1)),
            **{f"fixed {ratio:g}": lambda ratio=ratio: bench.pinned(ratio, num_steps) for ratio in ratios},
            "closed loop": lambda: bench.pinned(None, 2 * num_steps),
        }
        bench.set_chi(1.0)
        seconds["homogeneous"] += bench.plain.window(2 * num_steps)
        bench.set_chi(chi)
        for name, run in settings.items():
            seconds[name] += run()
    return dict(seconds)


def report(
    chi: float, seconds: dict[str, list[float]], trace: dict[str, list[float]], floor: float
) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    homogeneous, closed = medians["homogeneous"], medians["closed loop"]
    fixed = {name: value for name, value in medians.items() if name.startswith("fixed")}
    best = min(fixed, key=fixed.__getitem__)
    low, high = interval_of_ratio(seconds["closed loop"], seconds[best])
    print(f"\nχ={chi:g}: homogeneous {1e3 * homogeneous:.0f} ms; as ratios to it:")
    for name, value in medians.items():
        print(f"  {name:12} {value / homogeneous:6.3f}  (n={len(seconds[name])})")
    print(f"  closed loop / best fixed ({best}): {closed / medians[best]:.3f} [{low:.3f}, {high:.3f}]")
    print(f"  closed loop / Baseline: {closed / medians['baseline']:.3f}")
    print(f"  floor by measured cost of pruning: {floor / homogeneous:.3f} of homogeneous")
    for name, values in trace.items():
        print(f"  γ {name}: " + " ".join(f"{value:.3f}" for value in values))
    return {
        "chi": chi,
        "homogeneous_ms": 1e3 * homogeneous,
        "to_homogeneous": {name: value / homogeneous for name, value in medians.items()},
        "best_fixed": best,
        "closed_to_best_fixed": [closed / medians[best], low, high],
        "closed_to_baseline": closed / medians["baseline"],
        "floor_to_homogeneous": floor / homogeneous,
        **{f"ratio_{name}": values for name, values in trace.items()},
    }


def predicted_floor_s(bench: ClosedLoopBench) -> float:
    """Busy seconds of the straggler at its cheapest ratio, by the measured cost of pruning; collectives come on top."""
    return gather_from_ranks(bench.balancer.metrics()["balance/least_busy_s"])[STRAGGLER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--kind", choices=("sleep", "contend"), default="sleep")
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="in a window")
    parser.add_argument("--update-every", type=int, default=10)
    arguments = parser.parse_args()

    ranks = ColossalAIRanks(pin=arguments.kind == "sleep")  # contention pins by itself
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=12)
    config = zr.BalanceConfig(mode="zero-rd", update_every=arguments.update_every)
    bench = ClosedLoopBench(ranks, shape, arguments.batch, arguments.kind, config)
    results = []
    for slowness in bench.slowness:
        slowness.__enter__()
    for chi in arguments.chi:
        bench.set_chi_at_update(1.0)
        before = bench.run_updates(2)
        bench.set_chi_at_update(chi)
        appears = bench.run_updates(5)
        seconds = compare(bench, chi, arguments.ratios, arguments.rounds, arguments.steps)
        steady = bench.run_updates(3)
        floor_s = predicted_floor_s(bench)
        bench.set_chi_at_update(1.0)
        recovers = bench.run_updates(4)
        if ranks.rank == 0:
            traces = {"before": before, "appears": appears, "steady": steady, "recovers": recovers}
            results.append(report(chi, seconds, traces, floor_s))
    for slowness in bench.slowness:
        slowness.__exit__(None, None, None)
    if ranks.rank == 0:
        chis = "-".join(f"{chi:g}" for chi in arguments.chi)
        name = f"zero_{arguments.kind}_h{arguments.hidden}_d{arguments.depth}_b{arguments.batch}_chi{chis}"
        save(name, {"arguments": vars(arguments), "results": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
