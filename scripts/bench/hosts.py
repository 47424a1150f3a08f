"""What balancing costs and gains in hosts of DTensors: torchrun --nproc-per-node 2 -m scripts.bench.hosts --host NAME

Copies of a LLaMA-like model train in the same processes: the host's, a second copy of it (for the A/A interval), one
that is converted, with a balancer in mode "off", and one with the default. First losses of some steps are compared.
Then steps are timed in turn, in changing order, and compared pair by pair, while nobody is slow. Then the last rank
sleeps after its products (χ), the default settles, and its step is compared with the work-conserving bound T*; at the
end the slowness ends, and told is after how many updates all units are home. A single rank has nobody to wait for: only
the host's time is compared.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch.distributed as dist

import zeroresize as zr
from scripts.bench.common import (
    bootstrap_interval,
    describe_ratio,
    gather_from_ranks,
    interval_of_ratio,
    save,
    shortest_step_s,
    slowness_of,
)
from scripts.bench.host_ranks import HOSTS, HostRanks, HostTrainer

HOST, AGAIN, OFF, ON = "host", "host again", "converted, mode off", "the default"
#: After which units are home in any case.
_MOST_UPDATES = 40


def largest_difference(trainers: dict[str, HostTrainer], num_steps: int) -> dict[str, float]:
    """Return by how much losses differ from the host's, relatively, at most, by copy."""
    differences = dict.fromkeys(trainers, 0.0)
    for _ in range(num_steps):
        losses = {name: trainer.step() for name, trainer in trainers.items()}
        for name, loss in losses.items():
            differences[name] = max(differences[name], abs(loss - losses[HOST]) / abs(losses[HOST]))
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=260)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--chi", type=float, default=4.0)
    parser.add_argument("--updates", type=int, default=8, help="for the default to settle")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="in a window")
    arguments = parser.parse_args()
    ranks = HostRanks(arguments.host)
    size = {key: getattr(arguments, key) for key in ("hidden", "depth", "heads", "batch", "length")}
    trainers = {name: ranks.trainer(**size) for name in (HOST, AGAIN, OFF, ON)}
    off = ranks.balance(trainers[OFF], zr.BalanceConfig(mode="off"))
    on = ranks.balance(trainers[ON], zr.BalanceConfig(update_every=5))
    result: dict[str, object] = {"arguments": vars(arguments)}
    differences = largest_difference(trainers, 5)
    if ranks.rank == 0:
        print(f"largest relative difference of losses from the host's in 5 steps: {differences}")
    if arguments.pairs:
        result["overhead"] = overhead(ranks, trainers, arguments.pairs)
    if ranks.num_ranks > 1:
        result["slow"] = slow(ranks, trainers, off, on, arguments)
    if ranks.rank == 0:
        save(f"hosts_{arguments.host}_h{arguments.hidden}", result)
    dist.destroy_process_group()


def overhead(ranks: HostRanks, trainers: dict[str, HostTrainer], num_pairs: int) -> dict[str, list[float]]:
    """Return steps as ratios to the host's while nobody is slow: median and interval, by copy."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    orders = itertools.cycle(itertools.permutations(trainers))
    for _ in range(5 + num_pairs):
        for name in next(orders):
            seconds[name].append(trainers[name].timed_step())
    timed = {name: values[5:] for name, values in seconds.items()}
    ratios = {
        name: [other / base for other, base in zip(timed[name], timed[HOST], strict=True)] for name in (AGAIN, OFF, ON)
    }
    if ranks.rank == 0:
        print(f"median step of the host alone: {1e3 * statistics.median(timed[HOST]):.1f} ms")
        for name, values in ratios.items():
            print(describe_ratio(f"{name} / {HOST}", values))
    return {name: [statistics.median(values), *bootstrap_interval(values)] for name, values in ratios.items()}


def slow(
    ranks: HostRanks, trainers: dict[str, HostTrainer], off: zr.Balancer, on: zr.Balancer, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return what a settled step takes while the last rank is slow, and after how many updates units are home again."""
    chis = [1.0] * (ranks.num_ranks - 1) + [arguments.chi]
    slowness = {name: slowness_of(trainers[name].model) for name in (OFF, ON)}
    for each in slowness.values():
        each.__enter__()
    slowness[ON].chi = chis[ranks.rank]
    for _ in range(arguments.updates * on.config.update_every):
        trainers[ON].step()
    seconds: dict[str, list[float]] = {"homogeneous": [], "Baseline": [], ON: []}
    for _ in range(arguments.rounds):
        slowness[OFF].chi = 1.0
        seconds["homogeneous"] += trainers[OFF].window(arguments.steps)
        slowness[OFF].chi = chis[ranks.rank]
        seconds["Baseline"] += trainers[OFF].window(2)
        seconds[ON] += trainers[ON].window(arguments.steps)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    moving_rest = statistics.fmean(gather_from_ranks(on.metrics()["balance/moving_rest"]))
    for _ in range(2 * off.config.update_every):  # so that the last interval is an undisturbed one for the fast rank
        trainers[OFF].step()
    bound_s = shortest_step_s(off, chis, medians["homogeneous"])
    units_bound_s = shortest_step_s(off, chis, medians["homogeneous"], moving_rest)
    owned = gather_from_ranks(on.metrics()["balance/owned_share"])
    slowness[ON].chi = 1.0
    num_updates = 0
    while len(set(on.plan.owned)) > 1 and num_updates < _MOST_UPDATES:
        for _ in range(on.config.update_every):
            trainers[ON].step()
        num_updates += 1
    trainers = {name: trainers[name] for name in (HOST, ON)}
    result = {
        "homogeneous_s": medians["homogeneous"],
        "Baseline": medians["Baseline"] / medians["homogeneous"],
        "step": medians[ON] / medians["homogeneous"],
        "to_bound": medians[ON] / bound_s,
        "to_units_bound": medians[ON] / units_bound_s,
        "updates_until_home": num_updates,
    }
    if ranks.rank == 0:
        low, high = interval_of_ratio(seconds[ON], seconds["homogeneous"])
        print(
            f"χ = {arguments.chi:g}: homogeneous {1e3 * result['homogeneous_s']:.0f} ms, Baseline "
            f"{result['Baseline']:.3f} of it, the default {result['step']:.3f} [{low:.3f}, {high:.3f}], T* "
            f"{bound_s / medians['homogeneous']:.3f}; the default {result['to_bound']:.3f} of T*, "
            f"{result['to_units_bound']:.3f} with what moves along; ranks own {[round(one, 3) for one in owned]}; all "
            f"units home {num_updates} updates after the end"
        )
    return result


if __name__ == "__main__":
    main()
