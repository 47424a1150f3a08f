"""Few keys' heads: torchrun --nproc-per-node 2 -m scripts.bench.query_heads

Copies of a LLaMA of transformers, of this package's layers, train in the same processes and take turns; the last rank
sleeps after each matrix multiplication. One is not balanced, one moves whole groups of queries' heads with their keys'
head, one moves queries' heads, one lets ranks divide them. Told are steps as ratios to the homogeneous one, and what
share of the removable is removed, the bound being T*, which no exact scheme that moves products can beat; and T of
heads, the best that divisions of whole heads can do, whose weights are updated where they are. Four ranks on two cores
want ``--everyone 8`` (see ``modes``). With ``--units alone parts --chi 1`` nobody is slow, beside a model that nothing
was converted in.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import transformers

import zeroresize as zr
from scripts.bench.bounds import shortest_by_heads_s, shortest_step_s
from scripts.bench.common import (
    in_turns,
    interval_of_ratio,
    join_ranks,
    keep_freed_memory,
    parser_of,
    pin_to_core,
    run,
    save,
    show,
)
from zeroresize.conversion import balanced_layers
from zeroresize.injection.delay import CpuDelay
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.layers.segments import all_segments, owned_segments
from zeroresize.plan.ownership import SegmentWork
from zeroresize.utils.torch_state import synchronize

UNITS = ("alone", "groups", "heads", "parts")
WORDS = 256


def llama(options: Any, device: torch.device, kind: Any = transformers.LlamaModel) -> Any:
    """An undivided LLaMA of transformers, alike on all ranks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.neurons,
        num_hidden_layers=options.depth,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=WORDS,
    )
    return kind(config).to(device)


def divide(model: torch.nn.Module) -> None:
    """Give a LLaMA this package's layers, divided by all ranks."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, torch.nn.Linear):
                is_row = name in ("o_proj", "down_proj")
                kind = zr.RowParallelLinear if is_row else zr.ColumnParallelLinear
                setattr(module, name, kind.from_linear(layer, process_group=dist.group.WORLD))


class Copy:
    """A model in training: not balanced, by whole groups, by queries' heads, or by parts of them."""

    def __init__(self, options: Any, units: str, device: torch.device) -> None:
        self.model, self.device = llama(options, device), device
        divide(self.model)
        if units != "alone":
            zr.convert(self.model)
        layers = balanced_layers(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        mode = "off" if units == "off" else "exact"
        balance = zr.BalanceConfig(mode=mode, update_every=options.update_every)
        self.balancer = zr.Balancer(self.model, self.optimizer, balance) if units != "alone" else None
        self.slowness = SlowLayers(list(layers.values()), "gemm", CpuDelay(work_clock=time.thread_time))
        words = torch.randint(WORDS, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))
        self.words = words.to(device)
        self.slowness.chi, self.update_s = options.everyone, list[float]()
        if max(options.chi) * options.everyone > 1.0:
            self.slowness.__enter__()
        self.steps(1)  # after which it is measured what copies cost
        if units in ("groups", "heads"):
            mover = self.balancer._parts.mover
            costs = mover._decider.controller.ownership.copy_costs
            too_dear = {"any_block": 1e9, "any_whole": 1e9} if units == "groups" else {"any_whole": 1e9}
            mover._expect_copies(replace(costs, **too_dear))

    def steps(self, number: int) -> list[float]:
        """Seconds of some steps that all ranks begin together."""
        seconds = []
        for _ in range(number):
            dist.barrier()
            began = self.now()
            self.model(input_ids=self.words).last_hidden_state.square().mean().backward()
            updates = self.now()
            self.optimizer.step()
            self.update_s.append(self.now() - updates)
            self.optimizer.zero_grad()
            if self.balancer is not None:
                self.balancer.step()
            seconds.append(self.now() - began)
        return seconds

    def now(self) -> float:
        """Seconds, once the device has done all that it was given."""
        synchronize(self.device)
        return time.perf_counter()

    @property
    def heads(self) -> tuple[float, ...]:
        """How many heads of the first attention each rank owns."""
        segments = all_segments(balanced_layers(self.model))
        return next((segment.counts for segment in segments if segment.kind == "heads"), ())

    @property
    def work(self) -> SegmentWork:
        """What all attentions are of the products, in whole heads."""
        works, segments = self.balancer._parts.mover.units.works, owned_segments(balanced_layers(self.model))
        works = [work for work, segment in zip(works, segments, strict=False) if segment.kind == "heads"]
        each, slices = works[0], works[0].slices
        whole = {"num_units": each.num_units // slices, "block": each.block // slices, "slices": 1}
        return replace(each, work=sum(work.work for work in works), **whole)


def main() -> None:
    parser = parser_of(
        __doc__,
        **{"hidden": 1024, "neurons": 2816, "depth": 2, "heads": 16, "kv_heads": 2, "batch": 4, "tokens": 128},
        **{"chi": [2.0, 4.0], "rounds": 12, "steps": 4, "settle": 60, "update_every": 5, "everyone": 1.0},
    )
    parser.add_argument("--units", nargs="+", choices=UNITS, default=UNITS[1:])
    options = parser.parse_args()
    results = measure(options, begin())
    if dist.get_rank() == 0:
        save("query_heads", {"options": vars(options), "results": results})
    dist.destroy_process_group()


def begin() -> torch.device:
    """Join the other ranks of torchrun; returns this rank's device, which on a CPU is a core and one thread."""
    device = join_ranks(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    if device.type == "cpu":
        pin_to_core()
        keep_freed_memory()
    return device


def measure(options: Any, device: torch.device) -> list[dict[str, Any]]:
    """Train the copies in turns, show a table, and return a row for each χ and way to balance; collective."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    copies = {units: Copy(options, units, device) for units in ("off", *options.units)}

    def slow(chi: float) -> None:
        for copy in copies.values():
            copy.slowness.chi = options.everyone * (chi if rank == last else 1.0)

    def homogeneous() -> list[float]:
        slow(1.0)
        seconds = copies.get("alone", copies["off"]).steps(options.steps)
        slow(chi)
        return seconds

    rows, results = [], []
    for chi in options.chi:
        slow(chi)
        settling = {name: sum(copy.steps(options.settle)) for name, copy in copies.items()}
        settings = {name: partial(copy.steps, options.steps) for name, copy in copies.items()}
        turns = in_turns({"homogeneous": homogeneous, **settings}, options.rounds)
        seconds = {name: list(chain.from_iterable(of_name)) for name, of_name in turns.items()}
        usual = {name: statistics.median(of_name) for name, of_name in seconds.items()}
        chis, balancer = [1.0] * last + [chi], copies["off"].balancer
        shortest_s = shortest_step_s(balancer, chis, usual["homogeneous"])
        work, update_s = copies["off"].work, statistics.median(copies["off"].update_s)
        by_heads_s = shortest_by_heads_s(balancer, chis, usual["homogeneous"], work, update_s)
        for name, copy in copies.items():
            low, high = interval_of_ratio(seconds[name], seconds["homogeneous"])
            removed, of_heads = (
                (usual["off"] - usual[name]) / (usual["off"] - least_s) if chi > 1.0 else 0.0
                for least_s in (shortest_s, by_heads_s)
            )
            ratio = usual[name] / usual["homogeneous"]
            first = settling[name] / settling["off"]
            at_first = (settling["off"] - settling[name]) / (settling["off"] - options.settle * shortest_s)
            shares = [f"{share:.2f}" for share in (removed, of_heads, at_first, first)]
            rows.append([chi, name, f"{ratio:.3f} [{low:.3f}, {high:.3f}]", *shares, copy.heads])
            result = {"chi": chi, "units": name, "ratio": [ratio, low, high], "removed": removed}
            result["bound"] = shortest_s / usual["homogeneous"]
            results.append(result | {"of_heads": of_heads, "at_first": at_first, "first": first, "heads": copy.heads})
        rows.append([chi, "T of heads", f"{by_heads_s / usual['homogeneous']:.3f}", "", "1.00", "", "", ""])
        rows.append([chi, "T*", f"{shortest_s / usual['homogeneous']:.3f}", "1.00", "", "", "", ""])
    if rank == 0:
        show(
            "Steps, of the homogeneous one",
            ["chi", "units", "ratio", "of the removable", "by heads", "in first steps", "these, of off's", "heads"],
            rows,
        )
    return results


if __name__ == "__main__":
    run(main)
