"""Few KV heads on real ranks: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m scripts.bench.grouped_heads

Two copies of a LLaMA of transformers, split by this package's layers, train in the same processes and take turns; the
last rank sleeps after its products. Query heads that share a KV head move together, so a rank can give away all of an
attention or nothing where it has one KV head. Steps as ratios to a homogeneous step with balancing off: Baseline (off),
the default, and the bound T* of whatever divides products.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import zeroresize as zr
from scripts.bench.common import TimedSteps, interval_of_ratio, pin_to_core, save, shortest_step_s, slowness_of
from zeroresize.convert import balanced_layers

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")


def split(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Attention and feed-forward layers over the group, in place."""
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in (*_COLUMN, *_ROW):
            made_by = zr.ColumnParallelLinear if leaf in _COLUMN else zr.RowParallelLinear
            setattr(model.get_submodule(parent), leaf, made_by.from_linear(module, process_group=group))


class Copy(TimedSteps):
    """A model in training under one mode."""

    def __init__(self, arguments: argparse.Namespace, mode: str) -> None:
        import transformers

        torch.manual_seed(0)
        shape = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=arguments.hidden,
            num_hidden_layers=arguments.depth,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.kv_heads,
            intermediate_size=arguments.intermediate,
            max_position_embeddings=arguments.length,
            attn_implementation="sdpa",
        )
        self.model = transformers.LlamaModel(shape)
        group = dist.group.WORLD
        split(self.model, group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        config = zr.BalanceConfig(mode=mode, update_every=arguments.update_every)
        zr.convert(self.model, process_group=group)
        self.balancer = zr.Balancer(self.model, self.optimizer, process_group=group, config=config)
        self.slowness = slowness_of(self.model)
        self.slowness.__enter__()
        self.words = torch.randint(256, (arguments.batch, arguments.length))

    def step(self) -> float:
        """Make a training step and return the loss."""
        loss = self.model(input_ids=self.words, use_cache=False).last_hidden_state.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.balancer.step()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0])
    parser.add_argument("--update-every", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8, help="in which the default settles")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of each copy in a round; one interval")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pin_to_core()
    table = Table("KV heads", "χ", "homogeneous, ms", "T*", "Baseline", "exact", "95 %", "columns of rank 0")
    rows = []
    for kv_heads in arguments.kv_heads:
        shape = argparse.Namespace(**{**vars(arguments), "kv_heads": kv_heads})
        for chi in arguments.chi:
            row = _row(shape, chi)
            rows.append({"kv_heads": kv_heads, "chi": chi, **row})
            table.add_row(
                str(kv_heads), f"{chi:g}", f"{1e3 * row['homogeneous_s']:.0f}", f"{row['bound']:.2f}",
                f"{row['baseline']:.2f}", f"{row['exact']:.2f}", "{:.2f} to {:.2f}".format(*row["interval"]),
                "; ".join(row["columns"]),
            )  # fmt: skip
    if dist.get_rank() == 0:
        Console(width=160).print(table)
        save("grouped_heads", {"arguments": vars(arguments), "rows": rows})
    dist.destroy_process_group()


def _row(arguments: argparse.Namespace, chi: float) -> dict[str, object]:
    off, exact = Copy(arguments, "off"), Copy(arguments, "exact")
    for copy in (off, exact):
        for _ in range(3 * arguments.update_every):
            copy.timed_step()
    chis = [*[1.0] * (dist.get_world_size() - 1), chi]

    def window(copy: Copy, chi: float) -> list[float]:
        copy.slowness.chi = chi if dist.get_rank() == len(chis) - 1 else 1.0
        return copy.window(arguments.steps)

    for _ in range(arguments.updates):
        window(exact, chi)
    homogeneous: list[float] = []
    seconds: dict[str, list[float]] = {"off": [], "exact": []}
    for _ in range(arguments.rounds):
        homogeneous += window(off, 1.0)
        seconds["off"] += window(off, chi)
        seconds["exact"] += window(exact, chi)
    homogeneous_s = statistics.median(homogeneous)
    result = {
        "homogeneous_s": homogeneous_s,
        "bound": shortest_step_s(off.balancer, chis, homogeneous_s) / homogeneous_s,
        "baseline": statistics.median(seconds["off"]) / homogeneous_s,
        "exact": statistics.median(seconds["exact"]) / homogeneous_s,
        "interval": interval_of_ratio(seconds["exact"], homogeneous),
        "columns": _columns(exact),
    }
    for copy in (off, exact):
        copy.slowness.__exit__(None, None, None)
        copy.balancer.close()
    return result


def _columns(copy: Copy) -> Sequence[str]:
    """How many this rank has of the layers that start a segment, in the first block."""
    return [
        f"{name.rsplit('.', 1)[-1]} {layer.weight.size(0)}"
        for name, layer in balanced_layers(copy.model).items()
        if "layers.0." in name and name.endswith(("q_proj", "up_proj"))
    ]


if __name__ == "__main__":
    main()
