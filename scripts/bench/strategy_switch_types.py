"""Switches in 32 and in 16 bits: torchrun --standalone --nproc-per-node 4 -m scripts.bench.strategy_switch_types

A LLaMA-like model on four ranks. Every switch between five strategies with gradients, in turns with everything in
float32, with weights in bfloat16, and with weights and gradients in bfloat16: bytes that all ranks send, and seconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial

import torch
import torch.distributed as dist

from lm_examples.llama import LlamaConfig, llama_layers
from scripts.bench.common import machine, save, time_slowest_rank
from scripts.bench.strategy_switches import STRATEGIES
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.switching.switch import SwitchReport

OPTIMIZER_STRATEGY = Strategy(1, 4, 1)
TYPES: dict[str, dict[str, torch.dtype]] = {
    "float32": {},
    "weights in bfloat16": {"compute_dtype": torch.bfloat16},
    "weights and gradients in bfloat16": {"compute_dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16},
}


def fill_gradients(model: SwitchableModel) -> None:
    for layer in model.stage_layers.values():
        for parameter in layer.parameters():
            parameter.sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(num_blocks=arguments.blocks, hidden_size=arguments.hidden, num_heads=8)
    models = {}
    for name, types in TYPES.items():
        torch.manual_seed(0)
        models[name] = SwitchableModel(
            llama_layers(config), strategies=STRATEGIES, optimizer_strategy=OPTIMIZER_STRATEGY, **types
        )
    seconds: dict[tuple[str, bool], list[float]] = {}
    sent = dict.fromkeys(itertools.product(TYPES, (False, True)), 0)
    for repeat in range(arguments.repeats + 1):
        for (before, after), (name, gradients) in itertools.product(itertools.permutations(STRATEGIES, 2), sent):
            model = models[name]
            model.switch_to(before, gradients=False)
            if gradients:
                fill_gradients(model)
            reports: list[SwitchReport] = []
            switch = partial(model.switch_to, after, gradients=gradients)
            taken_s = time_slowest_rank(lambda switch=switch, reports=reports: reports.append(switch()))
            model.drop_gradients()
            if repeat:  # the first one plans, and warms up
                seconds.setdefault((name, gradients), []).append(taken_s)
            else:
                sent[name, gradients] += reports[0].sent_bytes
    counts = torch.tensor(list(sent.values()))
    dist.all_reduce(counts)
    rows = {
        f"{name}, {'with' if gradients else 'without'} gradients": {
            "sent_mb": num_bytes / 1e6,
            "mean_ms": 1e3 * statistics.mean(seconds[name, gradients]),
        }
        for (name, gradients), num_bytes in zip(sent, counts.tolist(), strict=True)
    }
    if dist.get_rank() == 0:
        print(machine(), *(f"{name}: {row}" for name, row in rows.items()), sep="\n")
        save("strategy_switch_types", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
