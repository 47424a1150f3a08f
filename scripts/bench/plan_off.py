"""What a swapped layer costs while nothing is pruned: torchrun --nproc-per-node 2 -m scripts.bench.plan_off

Colossal-AI's own ViT, a second copy of it (for the A/A interval) and one that was converted after ``booster.boost``
with a Balancer in mode "off" that measures. First five training steps of each are compared bit by bit, losses and
weights; then their steps are timed in turn, in changing order, and compared pair by pair.

With ``--on exact`` a fourth copy trains with the closed loop on, all at its defaults: nobody is slow, so its steps
should take what those in mode "off" take.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
import torch.distributed as dist

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks, Trainer
from scripts.bench.common import bootstrap_interval, describe_ratio, save
from vit_examples.config import ModelConfig
from zeroresize.config.keys import MODES


def local_parameters(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def assert_bitwise_equal(ranks: ColossalAIRanks, host: Trainer, swapped: Trainer, num_steps: int = 5) -> None:
    for step in range(num_steps):
        host_loss, swapped_loss = host.step(), swapped.step()
        same = host_loss == swapped_loss and all(
            torch.equal(a, b) for a, b in zip(local_parameters(host), local_parameters(swapped), strict=True)
        )
        if not same:
            raise SystemExit(f"rank {ranks.rank}: step {step} differs: losses {host_loss!r} and {swapped_loss!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--on", choices=[mode for mode in MODES if mode != "off"], help="a mode to be compared, too")
    arguments = parser.parse_args()

    ranks = ColossalAIRanks()
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=12)
    names = ["own", "own again", "converted, mode off", *(["converted, on"] if arguments.on else [])]
    trainers = {name: ranks.trainer(shape, batch_size=arguments.batch) for name in names}
    swapped = trainers["converted, mode off"]
    balancer = ranks.balance(swapped, zr.BalanceConfig(mode="off"))
    assert_bitwise_equal(ranks, trainers["own"], swapped)
    if ranks.rank == 0:
        print("bitwise equal: losses and weights of 5 training steps")
    watched = ranks.balance(trainers["converted, on"], zr.BalanceConfig(mode=arguments.on)) if arguments.on else None

    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    measuring_s: list[float] = []
    orders = itertools.cycle(itertools.permutations(trainers))
    for _ in range(5 + arguments.pairs):
        for name in next(orders):
            seconds[name].append(trainers[name].timed_step())
        measuring_s.append(balancer.metrics()["balance/balancing_s"])
    if ranks.rank == 0:
        timed = {name: values[5:] for name, values in seconds.items()}
        host_s = timed["own"]
        ratios_to_host = {
            name: [other / base for other, base in zip(timed[name], host_s, strict=True)] for name in list(timed)[1:]
        }
        print(f"median step of Colossal-AI's own layers: {1e3 * statistics.median(host_s):.1f} ms")
        print(describe_ratio("A/A (own again / own)", ratios_to_host["own again"]))
        print(describe_ratio("converted / own", ratios_to_host["converted, mode off"]))
        if watched is not None:
            off_s = timed["converted, mode off"]
            to_off = [other / base for other, base in zip(timed["converted, on"], off_s, strict=True)]
            ratios_to_host["on / off"] = to_off
            print(describe_ratio(f"mode {arguments.on} / mode off", to_off))
            print(f"owned share at the end: {watched.metrics()['balance/owned_share']:.3f}")
        share = statistics.mean(measuring_s[5:]) / statistics.median(timed["converted, mode off"])
        print(f"measuring: {1e6 * statistics.mean(measuring_s[5:]):.0f} µs a step, {100 * share:.3f} % of it")
        save(
            f"plan_off_h{arguments.hidden}_d{arguments.depth}_b{arguments.batch}",
            {
                "step_ms": 1e3 * statistics.median(host_s),
                "ratios": {
                    name: [statistics.median(values), *bootstrap_interval(values)]
                    for name, values in ratios_to_host.items()
                },
                "pairs": len(host_s),
                "measuring_share": share,
            },
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
