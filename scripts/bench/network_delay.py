"""Layers of a pipeline and a network of unstable bandwidth, simulated: python -m scripts.bench.network_delay

The setting of DynPipe's supplement, Fig. 3, on numbers: a GPT of 24 to 48 blocks of hidden size 1,024, pruned to 90 %,
on 8 stages of several nodes; micro-batches of 2 sequences of 2,048 tokens, four for each stage. A dense block takes 0.5
ms forward and 1 ms backward of a micro-batch. A pruned one takes a share of that, with a mean of 0.35 (sparse products
gain little) and log-normal over the blocks with σ = 0.4; it stays the same in a run. A message has 8.4 MB: 0.34 ms
between nodes (25 GB/s), 0.02 ms within. What a message takes between two nodes is multiplied by a factor of a normal
distribution from 1 to the most, with its mean in the middle and three standard deviations to each side, cut off there.
Each link draws one of its own, in each step or for 100 steps at a time.

Every 20th step is measured, exactly. Blocks of 70 MB move at 10 GB/s and 50 ms besides, by ski rental, and moves count
as if nothing of them were hidden. Each figure is the mean of runs with seeds of their own.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench.common import save
from scripts.simulated.pipeline_delays import DelayRule, simulate_delays, simulate_delays_oracle
from scripts.simulated.pipeline_training import LayerLoads
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import Floats

FORWARD_S, BACKWARD_S, SHARE, SPREAD, BLOCK_BYTES = 0.5e-3, 1e-3, 0.35, 0.4, 70e6
BETWEEN_NODES_S, WITHIN_NODE_S = 8.4e6 / 25e9, 0.02e-3
RULES = {
    "ignored": DelayRule("ignored"),
    "D.2, to the next": DelayRule("sent"),
    "D.2, to the last": DelayRule("arrival"),
    "newest": DelayRule("newest"),
    "running": DelayRule("running"),
    "running, partition": DelayRule("running", "partition"),
}
#: The least and the most factor of a link's delay, and for how many steps it stays.
NETWORKS = {
    "1": (1.0, 1.0, 1),
    "2.5": (2.5, 2.5, 1),
    "1 to 2, each step": (1.0, 2.0, 1),
    "1 to 2, 100 steps": (1.0, 2.0, 100),
    "1 to 4, each step": (1.0, 4.0, 1),
    "1 to 4, 100 steps": (1.0, 4.0, 100),
}


def messages(
    network: tuple[float, float, int], num_steps: int, num_stages: int, per_node: int, random: np.random.Generator
) -> Floats:
    """[N, S − 1] seconds of a message between two stages."""
    least, most, held = network
    drawn = random.standard_normal((-(-num_steps // held), num_stages - 1)).repeat(held, axis=0)[:num_steps]
    factors = np.clip((least + most) / 2 + drawn * (most - least) / 6, least, most)
    is_between = (np.arange(num_stages - 1) + 1) % per_node == 0
    return np.where(is_between, BETWEEN_NODES_S * factors, WITHIN_NODE_S)


def pruned_blocks(num_layers: int, num_steps: int, random: np.random.Generator) -> LayerLoads:
    shares = random.lognormal(0.0, SPREAD, num_layers)
    shares *= SHARE / shares.mean()
    forward_s, backward_s = (np.tile(seconds * shares, (num_steps, 1)) for seconds in (FORWARD_S, BACKWARD_S))
    return LayerLoads(forward_s, backward_s, np.full(num_layers, BLOCK_BYTES))


def compared(
    num_layers: int, network: str, num_stages: int, per_node: int, num_steps: int, num_seeds: int
) -> dict[str, Any]:
    """One row: seconds of a step without moves and with them, and moves, of every rule; means of all seeds."""
    num_microbatches = 4 * num_stages
    step_s: dict[str, list[float]] = {}
    moves: dict[str, list[int]] = {}
    spread = []
    for seed in range(num_seeds):
        loads = pruned_blocks(num_layers, num_steps, np.random.default_rng(seed))
        spread.append(float(loads.forward_s[0].max() / loads.forward_s[0].mean()))
        message_s = messages(NETWORKS[network], num_steps, num_stages, per_node, np.random.default_rng(1000 + seed))
        uniform = Partition.uniform(num_layers, num_stages).boundaries
        traces = {
            "static": simulate_delays(loads, message_s, uniform, num_microbatches=num_microbatches),
            **{
                name: simulate_delays(loads, message_s, uniform, num_microbatches=num_microbatches, rule=rule)
                for name, rule in RULES.items()
            },
            "oracle": simulate_delays_oracle(loads, message_s, num_microbatches=num_microbatches),
        }
        for name, trace in traces.items():
            step_s.setdefault(name, []).append(trace.total_s / num_steps)
            moves.setdefault(name, []).append(trace.num_moves)
    return {
        "num_layers": num_layers,
        "network": network,
        "slowest_block": float(np.mean(spread)),
        "tokens_per_s": {
            name: num_microbatches * 2 * 2048 / float(np.mean(of_seeds)) for name, of_seeds in step_s.items()
        },
        "step_s": {name: float(np.mean(of_seeds)) for name, of_seeds in step_s.items()},
        "faster": {name: float(np.mean(np.array(step_s["static"]) / of_seeds)) for name, of_seeds in step_s.items()},
        "moves": {name: float(np.mean(of_seeds)) for name, of_seeds in moves.items()},
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Throughput of the static pipeline, by how much the others are faster, and what they save of the removable."""
    table = Table(
        "layers", "factor of delays", "static, tokens/s", *RULES, "oracle", "ignored, of removable", "running"
    )
    for row in rows:
        seconds, faster, moves = row["step_s"], row["faster"], row["moves"]
        removed = [
            f"{100 * (seconds['static'] - seconds[name]) / (seconds['static'] - seconds['oracle']):.0f} %"
            for name in ("ignored", "running")
        ]
        table.add_row(
            str(row["num_layers"]),
            row["network"],
            f"{row['tokens_per_s']['static']:.0f}",
            *(f"{faster[name]:.3f} ({moves[name]:.0f})" for name in RULES),
            f"{faster['oracle']:.3f}",
            *removed,
            end_section=row["network"] == list(NETWORKS)[-1],
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 32, 40, 48])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=2, help="stages on each node")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for num_layers in options.layers:
        for network in NETWORKS:
            rows.append(compared(num_layers, network, options.stages, options.per_node, options.steps, options.seeds))
    Console(width=190).print(table_of(rows))
    save("network_delay", {**vars(options), "rows": rows})


if __name__ == "__main__":
    main()
