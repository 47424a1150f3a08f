"""Few keys' heads: torchrun --nproc-per-node 2 -m scripts.bench.query_heads

Copies of a LLaMA of transformers, of this package's layers, train in the same processes and take turns; the last rank
sleeps after each matrix multiplication. One is not balanced, one moves whole groups of queries' heads with their keys'
head, one moves queries' heads. Told are steps as ratios to the homogeneous one, and what share of the removable is
removed, the bound being T*, which no exact scheme that moves products can beat.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import transformers

import zeroresize as zr
from scripts.bench.balanced_copies import shortest_step_s
from scripts.bench.common import in_turns, interval_of_ratio, parser_of, pin_to_core, save, show
from zeroresize.conversion import balanced_layers
from zeroresize.injection.delay import HostDelay
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.layers.segments import all_segments


class Copy:
    """A model in training: not balanced, by whole groups, or by queries' heads."""

    def __init__(self, options: Any, units: str) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=options.neurons,
            num_hidden_layers=options.depth,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            vocab_size=256,
        )
        self.model, group = transformers.LlamaModel(config), dist.group.WORLD
        for module in list(self.model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    is_row = name in ("o_proj", "down_proj")
                    kind = zr.RowParallelLinear if is_row else zr.ColumnParallelLinear
                    setattr(module, name, kind.from_linear(layer, process_group=group))
        zr.convert(self.model)
        layers = balanced_layers(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        mode = "off" if units == "off" else "exact"
        balance = zr.BalanceConfig(mode=mode, update_every=options.update_every)
        self.balancer = zr.Balancer(self.model, self.optimizer, balance)
        self.slowness = SlowLayers(list(layers.values()), "gemm", HostDelay(work_clock=time.thread_time))
        self.words = torch.randint(256, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))
        self.steps(1)  # after which it is measured what copies cost
        if units == "groups":
            self.balancer._parts.mover._expect_copies(1e9)

    def steps(self, number: int) -> list[float]:
        """Seconds of some steps that all ranks begin together."""
        seconds = []
        for _ in range(number):
            dist.barrier()
            began = time.perf_counter()
            self.model(input_ids=self.words).last_hidden_state.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.balancer.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    @property
    def heads(self) -> tuple[int, ...]:
        """How many heads of the first attention each rank owns."""
        segments = all_segments(balanced_layers(self.model))
        return next(segment.owned.counts for segment in segments if segment.kind == "heads")


def main() -> None:
    options = parser_of(
        __doc__,
        **{"hidden": 1024, "neurons": 2816, "depth": 2, "heads": 16, "kv_heads": 2, "batch": 4, "tokens": 128},
        **{"chi": [2.0, 4.0], "rounds": 12, "steps": 4, "settle": 60, "update_every": 5},
    ).parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pin_to_core()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    copies = {units: Copy(options, units) for units in ("off", "groups", "heads")}

    def slow(chi: float) -> None:
        for copy in copies.values():
            copy.slowness.chi = chi if rank == last else 1.0

    def homogeneous() -> list[float]:
        slow(1.0)
        seconds = copies["off"].steps(options.steps)
        slow(chi)
        return seconds

    rows, results = [], []
    for copy in copies.values():
        copy.slowness.__enter__()
    for chi in options.chi:
        slow(chi)
        settling = {name: sum(copy.steps(options.settle)) for name, copy in copies.items()}
        settings = {name: partial(copy.steps, options.steps) for name, copy in copies.items()}
        turns = in_turns({"homogeneous": homogeneous, **settings}, options.rounds)
        seconds = {name: list(chain.from_iterable(of_name)) for name, of_name in turns.items()}
        usual = {name: statistics.median(of_name) for name, of_name in seconds.items()}
        shortest_s = shortest_step_s(copies["off"].balancer, [1.0] * last + [chi], usual["homogeneous"])
        for name, copy in copies.items():
            low, high = interval_of_ratio(seconds[name], seconds["homogeneous"])
            removed = (usual["off"] - usual[name]) / (usual["off"] - shortest_s)
            ratio = usual[name] / usual["homogeneous"]
            first = settling[name] / settling["off"]
            rows.append(
                [chi, name, f"{ratio:.3f} [{low:.3f}, {high:.3f}]", f"{removed:.2f}", f"{first:.2f}", copy.heads]
            )
            results.append({"chi": chi, "units": name, "ratio": [ratio, low, high], "removed": removed})
        rows.append([chi, "T*", f"{shortest_s / usual['homogeneous']:.3f}", "1.00", "", ""])
    if rank == 0:
        show(
            "Steps, of the homogeneous one",
            ["chi", "units", "ratio", "of the removable", "first steps, of off's", "heads"],
            rows,
        )
        save("query_heads", {"options": vars(options), "results": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
