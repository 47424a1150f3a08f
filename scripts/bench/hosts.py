"""What balancing costs and gains in a host: torchrun --nproc-per-node 2 -m scripts.bench.hosts --host NAME

Copies of a LLaMA that the host has divided, each with its own optimizer, train in the same processes and take turns:
two are the host's alone, one is converted in mode ``off``, one balances by ``exact``. χ = 1: while nobody is slow,
steps as ratios to the host's in the same turn, the second copy of the host telling how sure that is. Any other χ, after
a calibration at home: the last rank sleeps after each linear product, ``exact`` settles, and told are steps beside the
bound T*, below which no division of products can be, and after how many updates from the end of the slowness all units
are home. A step is that of the slowest rank.

``dtensor`` is torch's ``parallelize_module``, ``transformers`` its own plan (4.51 or 5), ``colossalai`` ShardFormer by
a Booster, ``deepspeed`` AutoTP with ZeRO-1, ``megatron`` Megatron-Core's GPTModel in its DistributedDataParallel. The
latter three run on CPUs, with what the tests put in place of CUDA and of a compiler, from the project's folder.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from scripts.bench.bounds import shortest_step_s
from scripts.bench.common import (
    bootstrap_interval,
    in_turns,
    interval_of_ratio,
    parser_of,
    run,
    save,
    show,
    time_slowest_rank,
)
from scripts.bench.query_heads import WORDS, begin, llama
from zeroresize.conversion import balanced_layers
from zeroresize.injection import SlowOps
from zeroresize.injection.delay import CpuDelay
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.layers.segments import all_segments

#: After so many updates units that are still away count as never home.
MOST_UPDATES = 20
#: For a run of seconds, which shows that it runs, and no more.
QUICK = {"hidden": 64, "neurons": 128, "heads": 4, "tokens": 16, "rounds": 2, "steps": 1, "settle": 2}


class Training(NamedTuple):
    """A model that its host has divided, as a balancer takes it, its optimizer, and a step without balancing."""

    model: Any
    optimizer: Any
    step: Callable[[], None]


def batch_of(options: Any) -> torch.Tensor:
    """[batch, tokens] words, alike on all ranks."""
    return torch.randint(WORDS, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))


def in_plain_loop(model: Any, options: Any) -> Training:
    """Training of a divided model of transformers by torch alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)  # DTensors lie beside plain tensors
    words = batch_of(options).to(model.device)

    def step() -> None:
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def split_by_styles(options: Any, device: torch.device, stack: ExitStack) -> Training:
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    model = llama(options, device, transformers.LlamaForCausalLM)
    for layer in model.model.layers:
        plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
        parallelize_module(layer, mesh, plan)
    return in_plain_loop(model, options)


def split_by_plan(options: Any, device: torch.device, stack: ExitStack) -> Training:
    plan: dict[str, Any] = {"tp_plan": "auto"}
    if int(transformers.__version__.split(".")[0]) >= 5:
        from transformers.distributed import DistributedConfig

        plan = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}
    whole = llama(options, device, transformers.LlamaForCausalLM)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            whole.save_pretrained(folder)
        dist.barrier()
        model = type(whole).from_pretrained(folders[0], **plan).train()
        dist.barrier()
    return in_plain_loop(model, options)


def split_by_autotp(options: Any, device: torch.device, stack: ExitStack) -> Training:
    from helpers.deepspeed_models import engine_of

    settings = {"micro_batches": 1, "train_micro_batch_size_per_gpu": options.batch, "steps_per_print": 10**9}
    model, words = llama(options, device, transformers.LlamaForCausalLM), batch_of(options)
    settings |= {"num_shards": dist.get_world_size(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4)}
    engine = engine_of(model, dist.get_rank(), stage=1, **settings)

    def step() -> None:
        engine.backward(engine(input_ids=words, labels=words).loss)
        engine.step()

    return Training(engine, engine.optimizer, step)


def split_by_booster(options: Any, device: torch.device, stack: ExitStack) -> Training:
    from helpers.colossalai_models import boosted

    model, words = llama(options, device, transformers.LlamaForCausalLM), batch_of(options).to(device)
    run = boosted(dist.group.WORLD, model, max_norm=0.0, tp_size=dist.get_world_size())

    def step() -> None:
        run.booster.backward(run.model(input_ids=words, labels=words).loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()

    return Training(run.model, run.optimizer, step)


def split_by_megatron(options: Any, device: torch.device, stack: ExitStack) -> Training:
    from helpers.megatron_models import config_of, gpt, learner, megatron_on_cpu
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    if not parallel_state.model_parallel_is_initialized():
        stack.enter_context(megatron_on_cpu(dist.get_world_size()))
    sizes = {"hidden_size": options.hidden, "num_layers": options.depth, "ffn_hidden_size": options.neurons}
    sizes |= {"num_attention_heads": options.heads, "num_query_groups": options.heads}
    model = gpt(config_of(**sizes), vocab_size=WORDS, max_sequence_length=options.tokens)
    wrapped, optimizer = learner(model, lr=1e-4)
    words, positions = batch_of(options), torch.arange(options.tokens).expand(options.batch, -1)
    mask = torch.ones(1, 1, options.tokens, options.tokens, dtype=torch.bool).triu(1)

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(words, positions, mask, labels=words).mean().backward()
        finalize_model_grads([wrapped])
        optimizer.step()

    return Training(wrapped, optimizer, step)


HOSTS: dict[str, Callable[[Any, torch.device, ExitStack], Training]] = {
    "dtensor": split_by_styles,
    "transformers": split_by_plan,
    "colossalai": split_by_booster,
    "deepspeed": split_by_autotp,
    "megatron": split_by_megatron,
}


class Copy:
    """A model in training by its host: alone, which is the mode None, or balanced."""

    def __init__(self, training: Training, mode: str | None, update_every: int) -> None:
        self.step, self.balancer = training.step, None
        delay = CpuDelay(work_clock=time.thread_time)
        self.slowness: SlowOps | SlowLayers = SlowOps()
        self.slowness._host = delay
        if mode is None:
            return
        config = zr.BalanceConfig(mode=mode, update_every=update_every)
        self.balancer = zr.Balancer(training.model, training.optimizer, config)
        self.layers = balanced_layers(training.model)
        self.slowness = SlowLayers(list(self.layers.values()), "gemm", delay)

    def steps(self, number: int) -> list[float]:
        """Seconds of some steps, each of the rank for which it took longest; collective."""
        return [time_slowest_rank(self._step) for _ in range(number)]

    def slowed(self, chi: float, number: int) -> list[float]:
        """The same while products take χ times as long here."""
        with self.slowness:
            self.slowness.chi = chi
            seconds = self.steps(number)
            self.slowness.chi = 1.0
        return seconds

    def _step(self) -> None:
        self.step()
        if self.balancer is not None:
            self.balancer.step()

    @property
    def is_home(self) -> bool:
        """Whether every rank owns the units that the host gave it."""
        return all(segment.owned.is_home for segment in all_segments(self.layers))


def undisturbed(copies: Mapping[str, Copy], options: Any) -> dict[str, Any]:
    """Steps of all copies while nobody is slow, as ratios to the host's of the same turn; collective."""
    turns = in_turns({name: partial(copy.steps, options.steps) for name, copy in copies.items()}, options.rounds)
    usual = {name: [statistics.median(seconds) for seconds in of_name] for name, of_name in turns.items()}
    ratios = {name: [a / b for a, b in zip(usual[name], usual["host"], strict=True)] for name in usual}
    rows = {name: (statistics.median(of_name), *bootstrap_interval(of_name)) for name, of_name in ratios.items()}
    if dist.get_rank() == 0:
        print(f"nobody slow: the host's step {1e3 * statistics.median(usual['host']):.0f} ms, {options.rounds} turns")
        show("", ["copy", "step / the host's"], [[name, told_of(*row)] for name, row in rows.items()])
    return {"chi": 1.0, "of_host": rows}


def disturbed(copies: Mapping[str, Copy], chi: float, options: Any) -> dict[str, Any]:
    """Steps while the last rank is slow, beside T*, and the updates until all units are home; collective."""
    last, every = dist.get_world_size() - 1, options.update_every
    chis = [1.0] * last + [chi]
    here = chis[dist.get_rank()]
    host, off, exact = copies["host"], copies["off"], copies["exact"]
    exact.slowed(here, options.settle * every)
    settings = {
        "homogeneous": partial(off.steps, options.steps),
        "host, nobody slow": partial(host.steps, options.steps),
        "host": partial(host.slowed, here, options.steps),
        "off": partial(off.slowed, here, options.steps),
        "exact": partial(exact.slowed, here, options.steps),
    }
    turns = in_turns(settings, options.rounds)
    seconds = {name: [each for turn in of_name for each in turn] for name, of_name in turns.items()}
    usual = {name: statistics.median(of_name) for name, of_name in seconds.items()}
    off.slowed(here, 2 * every)  # what the fast ranks were busy is of the last update
    shortest_s = shortest_step_s(off.balancer, chis, usual["homogeneous"])
    shares, updates = exact.balancer.plan.owned, list[zr.UpdateRecord]()
    exact.balancer.on_update = updates.append
    while not exact.is_home and len(updates) < MOST_UPDATES:
        exact.steps(1)
    home_after = len(updates) if updates and exact.is_home else None
    rows = {
        name: (usual[name] / usual["homogeneous"], *interval_of_ratio(seconds[name], seconds["homogeneous"]))
        for name in settings
    }
    to_bound = {name: usual[name] / shortest_s for name in settings}
    if dist.get_rank() == 0:
        owned, bound = [round(share, 2) for share in shares], shortest_s / usual["homogeneous"]
        ending = f"home {home_after} update(s) after the end" if home_after else "never home"
        print(f"χ = {chi:g}: homogeneous {1e3 * usual['homogeneous']:.0f} ms, T* {bound:.3f} of it")
        print(f"ranks own {owned}; {ending if updates else 'nothing has moved'}")
        table = [[name, told_of(*row), f"{to_bound[name]:.3f}"] for name, row in rows.items()]
        show("", ["copy", "step / homogeneous", "step / T*"], table)
    return {"chi": chi, "of_homogeneous": rows, "to_bound": to_bound, "owned": shares, "home_after": home_after}


def told_of(median: float, low: float, high: float) -> str:
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    sizes = {"hidden": 768, "neurons": 2048, "depth": 2, "heads": 12, "batch": 4, "tokens": 520}
    parser = parser_of(__doc__, **sizes, chi=[1.0, 4.0], rounds=40, steps=2, settle=8, update_every=5, quick=False)
    parser.add_argument("--host", choices=HOSTS, required=True)
    options = parser.parse_args()
    vars(options).update(QUICK if options.quick else {})
    options.kv_heads = options.heads
    device = begin()
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    modes = {"host": None, "host again": None, "off": "off", "exact": "exact"}
    with ExitStack() as stack:
        copies = {
            name: Copy(HOSTS[options.host](options, device, stack), mode, options.update_every)
            for name, mode in modes.items()
        }
        for copy in copies.values():
            copy.steps(3 * options.update_every)  # a calibration at home
        results = [
            undisturbed(copies, options) if chi == 1.0 else disturbed(copies, chi, options) for chi in options.chi
        ]
    if dist.get_rank() == 0:
        save(f"hosts_{options.host}", {"options": vars(options), "results": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
