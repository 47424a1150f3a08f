"""Resized products beside a roofline: python -m scripts.bench.kernels, on a GPU; --device cpu on the CPU.

For layers of ViT-1B and LLaMA-3 8B at TP 8, and an undivided one, on the CPU of a ViT of hidden size 768 at TP 2, for
each pruning ratio γ and length of the blocks in which columns are drawn: FLOPs of a product, the bytes that it reads
and writes at least, the whole product, and what the matrix product of the kept part alone takes, gathered before, in
torch's library: the floor. Beside it what products take with all that belongs to them, and the share of it that the
floor is: by gathering and scattering column by column, by plain torch as layers do, and by Triton. All take turns, so
that a drift of the clock hits all alike. At the end what all take together, as a share of the whole ones. Triton
computes on GPUs only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.bench import gathering
from scripts.bench.common import in_turns, parser_of, progress, run, save, show
from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.plan.layer import LayerPlan

#: N and K of a rank's layer.
LAYERS_ON_CPU = {"qkv": (1152, 768), "out": (768, 384), "up": (1536, 768), "down": (768, 1536)}
LAYERS = {
    "ViT-1B up": (1024, 2048),
    "ViT-1B down": (2048, 1024),
    "LLaMA-3 8B gate": (1792, 4096),
    "LLaMA-3 8B down": (4096, 1792),
    "LLaMA-3 8B query, whole": (4096, 4096),
}
PRODUCTS = ("forward", "dgrad", "wgrad")
Run = Callable[[], Tensor]


def main() -> None:
    defaults = {"tokens": 8192, "blocks": [1, 64], "rounds": 5, "repeats": 20, "dtype": "bfloat16"}
    parser = parser_of(__doc__, device="cuda", gammas=[0.25, 0.5, 0.75, 0.875, 0.9], **defaults)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = LAYERS_ON_CPU if options.device == "cpu" else LAYERS
    cases = [*product(layers.items(), options.gammas, options.blocks, PRODUCTS)]
    progress.total = len(cases) * options.rounds
    results = [measured(options, *case) for case in cases]
    names = list(results[0]["seconds"])
    keys = ("layer", "product", "gamma", "block")
    rows = [
        [result[key] for key in keys]
        + [f"{result['kept']:.3f}", f"{result['flops'] / 1e9:.2f}", f"{result['bytes'] / 1e6:.1f}"]
        + [shown(result["seconds"], name) for name in names]
        for result in results
    ]
    headings = ["layer", "product", "γ", "block", "kept", "GFLOP", "MB", *names]
    show(f"{options.device}, {options.dtype}", headings, rows)
    show("all products, of the whole ones", ["γ", "block", "kept", *names], together(options, results, names))
    save("kernels", {"arguments": vars(options), "results": results})


def shown(seconds: Mapping[str, float], name: str) -> str:
    share = "" if name in ("whole", "floor") else f" ({seconds['floor'] / seconds[name]:.2f})"
    return f"{1e6 * seconds[name]:.0f} µs{share}"


def together(options: Any, results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """A row for each γ and length of blocks: what all products take, and what is kept of their FLOPs."""
    rows = []
    for gamma, block in product(options.gammas, options.blocks):
        chosen = [result for result in results if (result["gamma"], result["block"]) == (gamma, block)]
        kept = sum(result["flops"] for result in chosen) / sum(result["flops"] / result["kept"] for result in chosen)
        sums = [sum(result["seconds"][name] for result in chosen) for name in names]
        rows.append([f"{gamma:g}", str(block), f"{kept:.3f}", *(f"{seconds / sums[0]:.3f}" for seconds in sums)])
    return rows


def measured(options: Any, layer: tuple[str, tuple[int, int]], gamma: float, block: int, which: str) -> dict[str, Any]:
    """The median seconds of each way to compute a product, and what it moves."""
    name, (N, K) = layer
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    sizes = {"x": (options.tokens, K), "w": (N, K), "dy": (options.tokens, N)}
    matrices = {key: torch.randn(size, device=device, dtype=dtype) for key, size in sizes.items()}
    num_pruned = block * min(round(gamma * K / block), K // block - 1)  # one block stays
    plan = plan_of(K, num_pruned, block, device)
    variants = {
        "whole": by_torch(reference, which, matrices, None),
        "floor": floor(which, matrices, plan),
        "gathering": by_torch(gathering, which, matrices, plan),
        "torch": by_torch(reference, which, matrices, plan),
    }
    if device.type == "cuda":
        configured = by_triton(which, matrices, plan)
        variants["Triton"] = min(configured, key=lambda ran: seconds_of(ran, device, options.repeats))
    rounds = in_turns(
        {key: lambda ran=ran: seconds_of(ran, device, options.repeats) for key, ran in variants.items()}, options.rounds
    )
    P, T = len(plan.keep_P), options.tokens
    moved = {"forward": T * P + N * P + T * N, "dgrad": T * N + N * P + T * K, "wgrad": T * N + T * P + N * K}
    return {
        "layer": name,
        "product": which,
        "gamma": gamma,
        "block": block,
        "kept": P / K,
        "flops": 2 * T * N * P,
        "bytes": moved[which] * dtype.itemsize,
        "seconds": {key: statistics.median(samples) for key, samples in rounds.items()},
    }


def plan_of(num_columns: int, num_pruned: int, block: int, device: torch.device) -> LayerPlan:
    """A plan that prunes so many columns, drawn in blocks."""
    order = torch.randperm(num_columns // block)[: num_pruned // block]
    return LayerPlan.from_pruned((block * order[:, None] + torch.arange(block)).flatten(), num_columns, device)


def floor(which: str, matrices: Mapping[str, Tensor], plan: LayerPlan) -> Run:
    """The matrix product alone, of operands that were gathered before."""
    x_TP, w_NP = (plan.kept.copy_of(matrices[key]) for key in ("x", "w"))
    dy_TN = matrices["dy"]
    a, b = {"forward": (x_TP, w_NP.t()), "dgrad": (dy_TN, w_NP), "wgrad": (dy_TN.t(), x_TP)}[which]
    return lambda: torch.mm(a, b)


def by_torch(kernels: ModuleType, which: str, matrices: Mapping[str, Tensor], plan: LayerPlan | None) -> Run:
    x_TK, w_NK, dy_TN = matrices["x"], matrices["w"], matrices["dy"]
    return {
        "forward": lambda: kernels.forward(x_TK, w_NK, None, plan, Probes()),
        "dgrad": lambda: kernels.dgrad(dy_TN, w_NK, plan, None, Probes()),
        "wgrad": lambda: kernels.wgrad(dy_TN, x_TK, plan, None, Probes()),
    }[which]


def by_triton(which: str, matrices: Mapping[str, Tensor], plan: LayerPlan) -> Sequence[Run]:
    """A run for each configuration that the device has room for."""
    import triton

    from zeroresize.kernels import triton_products
    from zeroresize.kernels.triton_tuning import CONFIGS

    x_TK, w_NK, dy_TN = matrices["x"], matrices["w"], matrices["dy"]
    inner, columns = triton_products.kept_inner, triton_products.kept_columns
    kept, where = plan.keep_P, (plan.keep_P, plan.pruned, plan.lent, plan.imputation, None, plan.kept.block)
    ways: dict[str, Callable[[Sequence[int]], Tensor]] = {
        "forward": lambda config: inner(x_TK, w_NK, None, kept, plan.kept.block, config),
        "dgrad": lambda config: columns(dy_TN, w_NK, *where, config),
        "wgrad": lambda config: columns(dy_TN.t(), x_TK, *where, config),
    }
    runs = []
    for config in CONFIGS:
        try:
            ways[which](config)
        except triton.TritonError:
            continue
        runs.append(lambda config=config: ways[which](config))
    return runs


def seconds_of(ran: Run, device: torch.device, repeats: int) -> float:
    """Seconds of one run, of many in a row, on the device's clock; on the CPU those that the process had."""
    ran()
    if device.type != "cuda":
        begin = time.process_time()
        for _ in range(repeats):
            ran()
        return (time.process_time() - begin) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        ran()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


if __name__ == "__main__":
    run(main)
