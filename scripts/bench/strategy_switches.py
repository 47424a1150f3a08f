"""Switches between strategies: torchrun --standalone --nproc-per-node 4 -m scripts.bench.strategy_switches

A LLaMA-like model on four ranks, as if two of them were one node. Every switch between five strategies is timed, in
turns with the planner's heuristics (HotSPa, Algorithm 1) and without: weights alone, and weights with gradients that
return to the optimizer's strategy (``--optimizer``). Beside stand the planned volume / the bandwidth of the same run,
in which every rank sends one large buffer to the next one, all at once; and the bytes that all ranks send in all
switches: the slides' Fig. 8, on real ranks. With ``--bfloat16`` weights and gradients travel in 16 bits.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lm_examples.llama import LlamaConfig, llama_layers
from scripts.bench.common import parser_of, run, save, show, time_slowest_rank
from zeroresize.comm.collectives import start_messages
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.resharding.agreement import wait_for_all
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.switching import switch as switching
from zeroresize.strategy.switching.switch import SwitchReport

STRATEGIES = [Strategy(*degrees) for degrees in ((4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2))]
NODES = (0, 0, 1, 1)
BUFFER_BYTES = 64 * 2**20
Matrix = dict[tuple[Strategy, Strategy], float]


@contextmanager
def planned(heuristics: bool) -> Iterator[None]:
    """Switches are planned with the heuristics, or without."""
    plans = {
        "plan_weights": partial(plan_weights, heuristics=heuristics),
        "plan_gradients": partial(plan_gradients, heuristics=heuristics),
    }
    with mock.patch.multiple(switching, **plans):
        yield


def ring() -> None:
    """Every rank sends a buffer to the next one, and receives one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2))
    group = dist.group.WORLD
    assert group is not None
    wait_for_all(start_messages({(rank + 1) % ranks: sent}, {(rank - 1) % ranks: received}, group))


def main() -> None:
    arguments = parser_of(__doc__, hidden=512, blocks=8, repeats=5, bfloat16=False, optimizer=[4, 1, 1]).parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(num_blocks=arguments.blocks, hidden_size=arguments.hidden, num_heads=8)
    types: dict[str, Any] = {"optimizer_strategy": Strategy(*arguments.optimizer)}
    if arguments.bfloat16:
        types |= {"compute_dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16}
    models, sent_bytes = {}, {}
    for heuristics in (True, False):
        torch.manual_seed(0)
        models[heuristics] = SwitchableModel(
            llama_layers(config), strategies=STRATEGIES, process_group=dist.group.WORLD, nodes=NODES, **types
        )
    bandwidths: list[float] = []
    seconds: dict[tuple[str, bool], dict[tuple[Strategy, Strategy], list[float]]] = {}
    for repeat in range(arguments.repeats + 1):
        bandwidths.append(BUFFER_BYTES / time_slowest_rank(ring))
        for (before, after), heuristics in itertools.product(itertools.permutations(STRATEGIES, 2), (True, False)):
            model = models[heuristics]
            with planned(heuristics):
                for what in ("weights", "weights and gradients"):
                    model.switch_to(before, gradients=False)
                    if what != "weights":
                        for layer in model.stage_layers.values():
                            torch.stack([parameter.sum() for parameter in layer.parameters()]).sum().backward()
                    reports: list[SwitchReport] = []
                    switch = partial(model.switch_to, after, gradients=what != "weights")
                    switch_s = time_slowest_rank(lambda switch=switch, reports=reports: reports.append(switch()))
                    model.drop_gradients()
                    key = what, heuristics
                    if repeat:
                        seconds.setdefault(key, {}).setdefault((before, after), []).append(switch_s)
                    else:  # the first one plans, and warms up
                        sent_bytes[key] = sent_bytes.get(key, 0) + reports[0].sent_bytes
    counts = torch.tensor(list(sent_bytes.values()))
    dist.all_reduce(counts)
    tensors, num_layers = models[True].tensors, models[True].num_layers
    links = LinkSpeeds(*[statistics.median(bandwidths)] * 2)
    layouts = {strategy: strategy.layout(tensors, 4, num_layers) for strategy in STRATEGIES}
    volumes = {
        (before, after): plan_weights(layouts[before], layouts[after], tensors, NODES).seconds(links)
        for before, after in itertools.permutations(STRATEGIES, 2)
    }
    medians = {
        key: {pair: statistics.median(values) for pair, values in matrix.items()} for key, matrix in seconds.items()
    }
    if dist.get_rank() == 0:
        size = sum(tensor.num_bytes for tensor in tensors)
        print(f"{size / 1e6:.0f} MB of weights, {links.within_bytes_per_s / 1e9:.2f} GB/s a rank")
        for (what, heuristics), num_bytes in zip(sent_bytes, counts.tolist(), strict=True):
            print(f"{what}, heuristics {heuristics}: {num_bytes / 1e6:,.0f} MB sent in all switches")
        tell(medians, volumes)
        matrices = {f"{what}, heuristics {heuristics}": matrix for (what, heuristics), matrix in medians.items()}
        matrices["volume / bandwidth"] = volumes
        plain = {
            what: {f"{before} to {after}": value for (before, after), value in matrix.items()}
            for what, matrix in matrices.items()
        }
        save("strategy_switches", {"weight_bytes": size, "links": asdict(links), **plain})
    dist.destroy_process_group()


def tell(medians: dict[tuple[str, bool], Matrix], volumes: Matrix) -> None:
    """What switches take as tables, and what the heuristics bring."""
    for (what, heuristics), matrix in medians.items():
        rows = []
        for before in STRATEGIES:
            cells = [
                "" if after == before else f"{1e3 * matrix[before, after]:.0f} ({1e3 * volumes[before, after]:.0f})"
                for after in STRATEGIES
            ]
            rows.append([before, *cells])
        which = "with" if heuristics else "without"
        title = f"{what}, {which} the heuristics, ms (bytes of weights / bandwidth, with them)"
        show(title, ("from \\ to", *map(str, STRATEGIES)), rows)
    for what in ("weights", "weights and gradients"):
        ratios = [medians[what, False][pair] / seconds for pair, seconds in medians[what, True].items()]
        print(f"{what}: without / with the heuristics, {_median_and_range(ratios)}")
    over = [seconds / volumes[pair] for pair, seconds in medians["weights", True].items() if volumes[pair]]
    print(f"time / (bytes / bandwidth): {_median_and_range(over)}")


def _median_and_range(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    run(main)
