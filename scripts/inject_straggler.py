"""Run any torchrun training script with some of its ranks made slow; nothing in the script changes.

    torchrun --nproc-per-node 2 scripts/inject_straggler.py --config inject.yaml train.py --its --args
    torchrun --nproc-per-node 2 scripts/inject_straggler.py --config inject.yaml -m package.train --its --args

What is slow is said in YAML: see inject_straggler.example.yaml beside this file. The products of any model are slowed,
Colossal-AI's and plain ones, forward and backward. Code inside torch.compile is not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import runpy
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeroresize.injection import SlowOps, round_robin
from zeroresize.injection.schedule import SCHEDULES, SCOPES, checked_chi
from zeroresize.utils.value_checks import at_least, known_keys, one_of
from zeroresize.utils.yaml_values import read_yaml


@dataclass(frozen=True, kw_only=True)
class InjectionConfig:
    """The keys of the YAML file, which inject_straggler.example.yaml explains."""

    chi: Any
    schedule: str = "static"
    scope: str = "gemm"
    iters_per_epoch: int | None = None
    tp_size: int | None = None
    stage_size: int | None = None

    @classmethod
    def of(cls, values: Any) -> InjectionConfig:
        """Check what a file says; a ValueError names the key, its value and what is allowed."""
        known_keys("key", values, [field.name for field in dataclasses.fields(cls)])
        if "chi" not in values:
            raise ValueError("chi is missing: expected {rank: χ}, such as {0: 4.0}")
        return cls(**values)

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("scope", self.scope, SCOPES)
        for key in ("iters_per_epoch", "tp_size", "stage_size"):
            value = getattr(self, key)
            if value is not None:
                at_least(key, value, 1)
        if self.tp_size is not None and self.stage_size is not None:
            raise ValueError(f"tp_size={self.tp_size} and stage_size={self.stage_size} do not go together")
        if self.schedule == "round_robin":
            if isinstance(self.chi, Mapping):
                raise ValueError(f"chi={self.chi!r} is not allowed with schedule: round_robin: one number is needed")
            if self.iters_per_epoch is None:
                raise ValueError("schedule: round_robin needs iters_per_epoch, the optimizer steps in an epoch")

    def chi_in(self, epoch: int, num_ranks: int) -> dict[int, float]:
        """{rank in its block: χ ≥ 1} of an epoch; a ValueError for a rank or χ that is not allowed."""
        chi = round_robin(self.chi)(epoch, num_ranks) if self.schedule == "round_robin" else self.chi
        return checked_chi(chi, num_ranks)


@dataclass(frozen=True)
class Place:
    """Where this process stands: its global rank, and its rank or stage among the ``num_ranks`` that chi counts."""

    global_rank: int
    rank: int
    num_ranks: int

    @classmethod
    def from_environment(cls, tp_size: int | None = None, stage_size: int | None = None) -> Place:
        """What torchrun says in RANK and WORLD_SIZE; a ValueError if ranks do not divide into blocks of such a size."""
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        for key, size in (("tp_size", tp_size), ("stage_size", stage_size)):
            if size is not None and world_size % size:
                raise ValueError(f"{key}={size} is not allowed: it must divide the {world_size} ranks")
        if stage_size is not None:
            return cls(rank, rank // stage_size, world_size // stage_size)
        num_ranks = tp_size or world_size
        return cls(rank, rank % num_ranks, num_ranks)


class Injection(SlowOps):
    """A context manager in which this process is as slow as the configuration says.

    An epoch is so many steps of the first optimizer that steps: wrappers and further ones do not count again.
    """

    def __init__(self, config: InjectionConfig, place: Place) -> None:
        super().__init__(scope=config.scope)
        self._config, self._place, self._num_steps = config, place, 0
        self._optimizer: Any = lambda: None
        self._set_epoch(0)

    def __enter__(self) -> Injection:
        super().__enter__()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        every = self._config.iters_per_epoch
        if self._optimizer() is optimizer and every is not None:
            self._num_steps += 1
            if self._num_steps % every == 0:
                self._set_epoch(self._num_steps // every)

    def _set_epoch(self, epoch: int) -> None:
        self.chi = self._config.chi_in(epoch, self._place.num_ranks).get(self._place.rank, 1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file that says who is slow")
    parser.add_argument("--dry-run", action="store_true", help="say what would be slowed, and stop")
    parser.add_argument("-m", action="store_true", dest="is_module", help="TARGET is a module, as in python -m")
    parser.add_argument("target", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    try:
        values = read_yaml(options.config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        config = InjectionConfig.of(values)
        place = Place.from_environment(config.tp_size, config.stage_size)
        stragglers = _stragglers(config, place.num_ranks)
    except ValueError as error:
        hint = "" if "WORLD_SIZE" in os.environ else " (run it under torchrun: there is one rank otherwise)"
        parser.error(f"{options.config}: {error}{hint}")

    def say(text: str) -> None:
        if place.global_rank == 0 or place.rank in stragglers:
            # One write a line: print() makes two where Python is unbuffered, and ranks share their standard output.
            sys.stdout.write(f"[inject_straggler rank {place.global_rank}] {text}\n")
            sys.stdout.flush()

    say(_description(config, place, stragglers))
    if options.dry_run:
        return
    if not options.is_module and not Path(options.target).exists():
        parser.error(f"{options.target}: no such file; it is the training script (or, with -m, a module)")
    injection = Injection(config, place)
    try:
        with injection:
            _run(options.target, options.args, options.is_module)
    finally:
        what = "products" if config.scope == "gemm" else "ops"
        say(f"{injection.num_products} {what} slowed, {injection.seconds_added:.3f} s added")


def _run(target: str, args: list[str], is_module: bool) -> None:
    """What ``python TARGET ARGS`` or ``python -m TARGET ARGS`` does, in this process."""
    sys.argv = [target, *args]
    sys.path[0] = os.getcwd() if is_module else str(Path(target).resolve().parent)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _stragglers(config: InjectionConfig, num_ranks: int) -> set[int]:
    """The ranks that are slow in some epoch."""
    epochs = range(num_ranks if config.schedule == "round_robin" else 1)
    return {rank for epoch in epochs for rank, chi in config.chi_in(epoch, num_ranks).items() if chi > 1.0}


def _description(config: InjectionConfig, place: Place, stragglers: set[int]) -> str:
    blocks = "" if config.tp_size is None else f" in each block of {place.num_ranks}"
    rank_word = "rank" if config.stage_size is None else "stage"
    if config.schedule == "round_robin":
        who = f"one of the {place.num_ranks} {rank_word}s{blocks} in turn has χ = {config.chi:g}, "
        who += f"the next every {config.iters_per_epoch} optimizer steps"
    else:
        chi = config.chi_in(0, place.num_ranks)
        slow = [f"{rank_word} {rank}{blocks} has χ = {chi[rank]:g}" for rank in sorted(stragglers)]
        who = ", ".join(slow) or f"no {rank_word} is slow"
    return f"{who} (scope {config.scope})"


if __name__ == "__main__":
    main()
