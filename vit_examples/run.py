"""Everything of one run on one rank: what it is made of, what it goes on from, and what it writes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from vit_examples.balance_log import BalanceLog
from vit_examples.batches import num_batches
from vit_examples.config import RunConfig
from vit_examples.data import Split, load_splits
from vit_examples.harness.checkpoints import load_checkpoint, save_checkpoint
from vit_examples.harness.program import agreed, of_all_ranks
from vit_examples.harness.run_folder import RunRecord, begin_run
from vit_examples.host import Host, host_class
from vit_examples.step_times import StepClock

_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    """What :func:`vit_examples.train.train` trains; made by :func:`prepare`.

    Attributes:
        epochs, steps: done; steps are the optimizer's in those epochs.
        first_step: of this process.
        losses: of the steps that are done of a further epoch.
        trace: which share of what its host gave it this rank does not compute, at each logged step of the epoch.
        record: on the first rank, None on the others.
        held: keeps other runs out of the output folder; close it when all is written.
    """

    config: RunConfig
    host: Host
    balancer: zr.Balancer
    train: Split
    test: Split
    clock: StepClock
    balance_log: BalanceLog
    epochs: int = 0
    steps: int = 0
    first_step: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    record: RunRecord | None = None
    trace: list[float] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        training = self.config.training
        whole = num_batches(self.train, training.batch_size)
        return min(whole, training.max_steps_per_epoch or whole)

    @property
    def total_steps(self) -> int:
        """Steps done, which a resumed run may have cut into epochs of another length, and those that are left."""
        return self.steps + (self.config.training.epochs - self.epochs) * self.steps_per_epoch

    def save(self) -> bool:
        """Write a checkpoint; returns whether it was written, on every rank; collective."""
        state = {
            "layout": layout_of(self.config, self.host.num_ranks),
            "epochs": self.epochs,
            "steps": self.steps,
            "seconds": self.clock.by_process,
            "loss_scale": self.host.loss_scale(),
            "losses": [loss.item() for loss in self.losses],
            "traces": of_all_ranks(self.trace, self.host.tp_group),
        }
        done = {"epoch": self.epochs} | ({"step": self.steps + len(self.losses)} if self.losses else {})
        tensors = self.host.model, self.host.optimizer
        return save_checkpoint(self.config, done, state, tensors, balancer=self.balancer)


def prepare(config: RunConfig, *, resume: bool) -> Run:
    """Load the data, join the other ranks, shard and convert the model, and continue where asked to; collective."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    config.validate_group_size(num_ranks)
    train, test = load_splits(config.data, config.model)
    num_batches(train, config.training.batch_size)
    kind = host_class(config)
    kind.join(config)
    with ExitStack() as held:
        resumed = begin_run(config, layout_of(config, num_ranks), None, held, resume=resume)
        host = kind(config)
        zr.convert(host.model, process_group=host.tp_group)
        balancer = zr.Balancer(host.model, host.optimizer, config.balance, process_group=host.tp_group)
        state: dict[str, Any] = {"epochs": 0, "steps": 0, "seconds": [], "losses": [], "traces": [[]] * num_ranks}
        if resumed is not None:
            checkpoint, state = resumed[0], state | resumed[1]  # older ones are of whole epochs only
            load_checkpoint(checkpoint, (host.model, host.optimizer), balancer=balancer)
            host.set_loss_scale(state["loss_scale"])
        folder, steps = Path(config.output.folder), state["steps"] + len(state["losses"])
        balance_log = agreed(lambda: BalanceLog(folder, dist.get_rank(), from_step=steps))
        balancer.on_update, balancer.on_status = balance_log, balance_log.status
        clock = StepClock(host.device, state["seconds"])
        run = Run(config, host, balancer, train, test, clock, balance_log, state["epochs"], state["steps"], steps)
        run.losses, run.trace = [*torch.tensor(state["losses"], device=host.device)], state["traces"][dist.get_rank()]
        run.record = agreed(
            lambda: RunRecord(
                config,
                f"{config.host}, {num_ranks} ranks, balance {config.balance.mode}",
                num_steps=run.total_steps,
                num_done=steps,
                files={"metrics": ("step", steps - 1)},
                first_event=steps,
            ),
            first_only=True,
        )
        run.held = held.pop_all()
    return run


def layout_of(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """Return what a checkpoint's tensors and balancers depend on."""
    precision, model = config.training.precision, dataclasses.asdict(config.model)
    return {"host": config.host, "tp_size": num_ranks, "precision": precision, "model": model}


def commit_of_code() -> str:
    """Return the short hash of the commit that the code is of, with ``-dirty`` where it differs; empty if not known."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    code = ("vit_examples", "zeroresize")  # training runs nothing else of the repository
    try:
        git("ls-files", "--error-unmatch", *code)  # it may lie, untracked, within a repository of something else
        changes = git("status", "--porcelain", "--", *code)
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
