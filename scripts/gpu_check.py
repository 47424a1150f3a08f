"""What GPUs are to show, with pass or fail: torchrun --nproc-per-node 4 -m scripts.gpu_check

Two to eight GPUs, joined by NCCL; less than 30 minutes. Checked is on a LLaMA whose heads and neurons move: that it
learns as the undivided model does (float64), that weights and Adam's moments that were away are bit for bit what they
were (float32 and bfloat16), how long a move takes, and what steps take, beside the bound T* that no exact scheme can
beat, where the last rank multiplies 2 and 4 times as long, and where nobody is slow. On CPUs, by gloo, it runs small,
with ``--small`` smaller still, and judges no times.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from scripts.bench.common import parser_of, run, save, show
from scripts.bench.query_heads import begin, divide, llama, measure
from zeroresize.conversion import balanced_layers

#: Of a model in float64, as shares of the largest weight; steps beside T*, and beside those of no balancing.
MOST_DIFFERENCE, MOST_OF_BOUND, MOST_OVERHEAD = 1e-10, 1.06, 1.01
#: A check: what was looked at, what was seen, what is allowed, and whether that is so; None for what is only told.
Check = tuple[str, str, str, bool | None]


def shares_of(num_ranks: int) -> Sequence[list[float]]:
    """By which units move: most on the first rank, most on the last, and home."""
    most_on_first = [3.0] + [1.0] * (num_ranks - 1)
    return most_on_first, most_on_first[::-1], [1.0] * num_ranks


def train(model: Any, words: torch.Tensor, num_steps: int, optimizer: Any, clip: Any, after: Any) -> None:
    """Steps of two micro-batches."""
    for step in range(num_steps):
        for part in words.chunk(2):
            (model(input_ids=part).last_hidden_state.square().mean() / 2).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def check_learning(options: Any, device: torch.device) -> Check:
    """Weights of a model whose units move, beside those of the undivided one."""
    whole = llama(options, device).double()
    model, all_shares = copy.deepcopy(whole), shares_of(dist.get_world_size())
    divide(model)
    zr.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"))
    words = torch.randint(256, (2 * options.batch, options.tokens), generator=torch.Generator().manual_seed(2)).to(
        device
    )
    num_steps = 2 * len(all_shares)

    def move(step: int) -> None:
        balancer.step()
        if step % 2:
            balancer.move(all_shares[step // 2])

    train(model, words, num_steps, optimizer, zr.clip_grad_norm_, move)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    train(whole, words, num_steps, optimizer, torch.nn.utils.clip_grad_norm_, lambda step: None)
    expected, difference, rank = whole.state_dict(), 0.0, dist.get_rank()
    layers = balanced_layers(model)
    for name, value in model.state_dict().items():
        layer, wanted = layers.get(name.removesuffix(".weight")), expected[name]
        if layer is not None:
            wanted = wanted.chunk(dist.get_world_size(), layer.divided_dim)[rank]
        difference = max(difference, ((value - wanted).abs().max() / wanted.abs().max()).item())
    worst = torch.tensor(difference, dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    balancer.close()
    return "weights, float64", f"{worst.item():.1e}", f"≤ {MOST_DIFFERENCE:g}", worst.item() <= MOST_DIFFERENCE


def check_return(options: Any, device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Weights and Adam's moments after their units were away, and what moves take."""
    model = llama(options, device).to(dtype)
    divide(model)
    zr.convert(model)
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"))
    words = torch.randint(256, (2 * options.batch, options.tokens), generator=torch.Generator().manual_seed(2)).to(
        device
    )
    train(model, words, 2, optimizer, zr.clip_grad_norm_, lambda step: balancer.step())

    def tensors() -> list[torch.Tensor]:
        parameters = [each for each in model.parameters() if each in optimizer.state]
        moments = [optimizer.state[each][key] for each in parameters for key in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().clone() for tensor in (*parameters, *moments)]

    before, seconds = tensors(), []
    for shares in shares_of(dist.get_world_size()):
        began = time.perf_counter()
        balancer.move(shares)
        seconds.append(time.perf_counter() - began)
    alike = torch.tensor(all(map(torch.equal, tensors(), before)), dtype=torch.int32, device=device)
    dist.all_reduce(alike, dist.ReduceOp.MIN)
    balancer.close()
    name = str(dtype).removeprefix("torch.")
    in_ms = " ".join(f"{1e3 * each:.0f}" for each in seconds)
    return [
        (f"there and back, {name}", "as before" if alike.item() else "changed", "bit for bit", bool(alike.item())),
        (f"moves, {name}", f"{in_ms} ms", "", None),
    ]


def check_speed(options: Any, device: torch.device) -> list[Check]:
    """Steps beside T*, and beside those of no balancing where nobody is slow."""
    checks: list[Check] = []
    for chi in (1.0, *options.chi):
        options_of_chi = copy.copy(options)
        options_of_chi.chi = [chi]
        off, balanced = measure(options_of_chi, device)
        (ratio, low, high), judged = balanced["ratio"], device.type == "cuda"
        if chi == 1.0:
            seen = f"{ratio / off['ratio'][0]:.3f} of no balancing"
            is_met = ratio / off["ratio"][0] <= MOST_OVERHEAD
            checks.append(("nobody is slow", seen, f"≤ {MOST_OVERHEAD}", is_met if judged else None))
            continue
        of_bound = ratio / balanced["bound"]
        seen = f"{off['ratio'][0]:.3f} → {ratio:.3f} [{low:.3f}, {high:.3f}], {of_bound:.3f} of T*"
        is_met = of_bound <= MOST_OF_BOUND
        checks.append((f"χ = {chi:g}", seen, f"≤ {MOST_OF_BOUND} of T*", is_met if judged else None))
    return checks


def sizes_of(device: torch.device, num_ranks: int, *, small: bool) -> dict[str, Any]:
    """Of a model of eight heads a rank, which share keys, and of its training; less on a CPU."""
    times: dict[str, Any] = {"update_every": 5, "everyone": 1.0, "units": ["parts"], "depth": 2}
    head_size, times["batch"], times["tokens"], times["settle"], times["rounds"], times["steps"] = (
        (8, 2, 16, 10, 2, 2) if small else (32, 4, 64, 40, 6, 4) if device.type == "cpu" else (128, 4, 2048, 60, 10, 4)
    )
    hidden = 8 * head_size * num_ranks
    return times | {"hidden": hidden, "neurons": 3 * hidden, "heads": 8 * num_ranks, "kv_heads": num_ranks}


def has_failed(checks: Sequence[Check]) -> bool:
    """Whether something is not as it must be."""
    return any(is_met is False for *_, is_met in checks)


def main() -> None:
    parser = parser_of(__doc__, chi=[2.0, 4.0], small=False)
    options, device = parser.parse_args(), begin()
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    vars(options).update(sizes_of(device, num_ranks, small=options.small))
    learning = copy.copy(options)
    vars(learning).update(sizes_of(device, num_ranks, small=True))
    checks = [check_learning(learning, device)]
    for dtype in (torch.float32, torch.bfloat16):
        checks += check_return(learning, device, dtype)
    checks += check_speed(options, device)
    if rank == 0:
        words = {True: "pass", False: "FAIL", None: ""}
        show("", ["what", "seen", "allowed", ""], [(*each[:3], words[each[3]]) for each in checks])
        devices = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        save("gpu_check", {"ranks": num_ranks, "device": devices, "options": vars(options), "checks": checks})
    dist.destroy_process_group()
    sys.exit(has_failed(checks))


if __name__ == "__main__":
    run(main)
