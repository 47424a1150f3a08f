"""Resized products beside a roofline: python -m scripts.bench.kernels, on a GPU; --device cpu --shrink 8 on the CPU.

For layers of ViT-1B and LLaMA-3 8B at TP 8 and each pruning ratio γ (in whole blocks): FLOPs of a product, the bytes
that it reads and writes at least, and what the matrix product of the kept part alone takes, gathered before, in torch's
library: the floor. Beside it what products take with all that belongs to them, and the share of it that the floor is:
plain torch, which gathers and fills, and Triton, with columns drawn one by one, and in blocks, of which whole tiles are
skipped. All take turns, so that a drift of the clock hits all alike. Triton computes on GPUs only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.bench.common import in_turns, parser_of, progress, run, save, show
from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.plan.layer import LayerPlan

#: N and K of a rank's layer.
LAYERS = {
    "ViT-1B up": (1024, 2048),
    "ViT-1B down": (2048, 1024),
    "LLaMA-3 8B gate": (1792, 4096),
    "LLaMA-3 8B down": (4096, 1792),
}
PRODUCTS = ("forward", "dgrad", "wgrad")
Run = Callable[[], Tensor]


def main() -> None:
    defaults = {"tokens": 8192, "block": 64, "shrink": 1, "rounds": 5, "repeats": 20, "dtype": "bfloat16"}
    parser = parser_of(__doc__, device="cuda", gammas=[0.25, 0.5, 0.75, 0.875, 0.9], **defaults)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = [(name, gamma, product) for name in LAYERS for gamma in options.gammas for product in PRODUCTS]
    progress.total = len(cases) * options.rounds
    results = [measured(options, *case) for case in cases]
    names = list(results[0]["seconds"])
    rows = [
        [result[key] for key in ("layer", "product", "gamma")]
        + [f"{result['flops'] / 1e9:.2f}", f"{result['bytes'] / 1e6:.1f}"]
        + [shown(result["seconds"], name) for name in names]
        for result in results
    ]
    show(f"{options.device}, {options.dtype}", ["layer", "product", "γ", "GFLOP", "MB", *names], rows)
    save("kernels", {"arguments": vars(options), "results": results})


def shown(seconds: Mapping[str, float], name: str) -> str:
    share = "" if name == "floor" else f" ({seconds['floor'] / seconds[name]:.2f})"
    return f"{1e6 * seconds[name]:.0f} µs{share}"


def measured(options: Any, name: str, gamma: float, product: str) -> dict[str, Any]:
    """The median seconds of each way to compute a product, and what it moves."""
    N, K = (size // options.shrink for size in LAYERS[name])
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    sizes = {"x": (options.tokens, K), "w": (N, K), "dy": (options.tokens, N)}
    matrices = {key: torch.randn(size, device=device, dtype=dtype) for key, size in sizes.items()}
    num_pruned = options.block * min(round(gamma * K / options.block), K // options.block - 1)  # one block stays
    columns, blocks = (plan_of(K, num_pruned, block, device) for block in (1, options.block))
    variants = {
        "floor": floor(product, matrices, columns),
        "torch": by_reference(product, matrices, columns),
        "torch, blocks": by_reference(product, matrices, blocks),
    }
    if device.type == "cuda":
        for key, plan in (("Triton", columns), ("Triton, blocks", blocks)):
            configured = by_triton(product, matrices, plan)
            best = min(configured, key=lambda ran: seconds_of(ran, device, options.repeats))
            variants[key] = best
    rounds = in_turns(
        {key: lambda ran=ran: seconds_of(ran, device, options.repeats) for key, ran in variants.items()}, options.rounds
    )
    P, T = len(columns.keep_P), options.tokens
    moved = {"forward": T * P + N * P + T * N, "dgrad": T * N + N * P + T * K, "wgrad": T * N + T * P + N * K}
    return {
        "layer": name,
        "product": product,
        "gamma": gamma,
        "flops": 2 * T * N * P,
        "bytes": moved[product] * dtype.itemsize,
        "seconds": {key: statistics.median(samples) for key, samples in rounds.items()},
    }


def plan_of(num_columns: int, num_pruned: int, block: int, device: torch.device) -> LayerPlan:
    """A plan that prunes so many columns, drawn in blocks."""
    order = torch.randperm(num_columns // block)[: num_pruned // block]
    return LayerPlan.from_pruned((block * order[:, None] + torch.arange(block)).flatten(), num_columns, device)


def floor(product: str, matrices: Mapping[str, Tensor], plan: LayerPlan) -> Run:
    """The matrix product alone, of operands that were gathered before."""
    x_TP, w_NP = (plan.kept.copy_of(matrices[key]) for key in ("x", "w"))
    dy_TN = matrices["dy"]
    a, b = {"forward": (x_TP, w_NP.t()), "dgrad": (dy_TN, w_NP), "wgrad": (dy_TN.t(), x_TP)}[product]
    return lambda: torch.mm(a, b)


def by_reference(product: str, matrices: Mapping[str, Tensor], plan: LayerPlan) -> Run:
    x_TK, w_NK, dy_TN = matrices["x"], matrices["w"], matrices["dy"]
    return {
        "forward": lambda: reference.forward(x_TK, w_NK, None, plan, Probes()),
        "dgrad": lambda: reference.dgrad(dy_TN, w_NK, plan, None, Probes()),
        "wgrad": lambda: reference.wgrad(dy_TN, x_TK, plan, None, Probes()),
    }[product]


def by_triton(product: str, matrices: Mapping[str, Tensor], plan: LayerPlan) -> Sequence[Run]:
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
            ways[product](config)
        except triton.TritonError:
            continue
        runs.append(lambda config=config: ways[product](config))
    return runs


def seconds_of(ran: Run, device: torch.device, repeats: int) -> float:
    """Seconds of one run, of many in a row, on the device's clock."""
    ran()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            ran()
        return (time.perf_counter() - begin) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        ran()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


if __name__ == "__main__":
    run(main)
