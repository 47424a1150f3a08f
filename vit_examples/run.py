"""Everything of one run on one rank: what it is made of, and what it goes on from."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zeroresize as zr
from vit_examples.balance_log import BalanceLog
from vit_examples.checkpoint import Progress, SavedState, layout_of
from vit_examples.config import RunConfig
from vit_examples.config_file import READER
from vit_examples.data import Split, load_splits, num_batches
from vit_examples.harness.all_ranks import on_all_ranks, on_first_rank
from vit_examples.harness.begin_run import begin_run
from vit_examples.harness.program import require_torchrun
from vit_examples.harness.run_folder import flat_settings
from vit_examples.harness.step_clock import StepClock
from vit_examples.host import Host, host_class
from vit_examples.recorder import Recorder
from zeroresize.comm.collectives import require_group


@dataclass
class Run:
    """What :func:`vit_examples.train.train` trains; made by :func:`prepare`.

    Attributes:
        trace: which share of what its host gave it this rank does not compute, at each logged step of the epoch.
        recorder: on the first rank, None on the others.
        held: what keeps other runs out of the output folder; close it when all is written.
    """

    config: RunConfig
    host: Host
    balancer: zr.Balancer
    train: Split
    test: Split
    progress: Progress
    clock: StepClock
    balance_log: BalanceLog
    recorder: Recorder | None = None
    trace: list[float] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def num_done(self) -> int:
        """How many epochs are trained."""
        return self.progress.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        training = self.config.training
        whole = num_batches(self.train, training.batch_size)
        return min(whole, training.max_steps_per_epoch or whole)

    @property
    def total_steps(self) -> int:
        """Steps done, which a resumed run may have cut into epochs of another length, and those that are left."""
        epochs_left = self.config.training.epochs - self.progress.epochs
        return self.progress.steps + epochs_left * self.steps_per_epoch

    def saved_state(self) -> SavedState:
        """Return what of this run is no tensor of its model."""
        progress = dataclasses.replace(
            self.progress,
            step_seconds=self.clock.by_process,
            timed_settings=timed_settings(self.config),
            commits=self.recorder.commits if self.recorder is not None else (),
        )
        return SavedState(layout_of(self.config, self.host.num_ranks), progress, self.host.loss_scale())


def prepare(config: RunConfig, *, resume: bool) -> Run:
    """Load the data, join the other ranks, shard and convert the model, and continue where asked to; collective.

    Raises:
        ValueError: for anything a user can mend, naming it.
    """
    require_torchrun("vit_examples.train --config demo")
    num_ranks = int(os.environ["WORLD_SIZE"])
    config.validate_group_size(num_ranks)
    train, test = load_splits(config.data, config.model)
    num_batches(train, config.training.batch_size)
    kind = host_class(config)
    kind.join(config)
    group = require_group(dist.group.WORLD)
    begun = begin_run(READER, config, group, layout=layout_of(config, num_ranks), kind=SavedState, resume=resume)
    with begun.held as held:
        host = kind(config)
        zr.convert(host.model, process_group=host.tp_group)
        balancer = zr.Balancer(host.model, host.optimizer, config.balance, process_group=host.tp_group)
        progress = Progress()
        if begun.saved is not None:
            checkpoint, state = begun.saved
            state.go_on(checkpoint, host, balancer)
            progress = state.progress
        folder = Path(config.output.folder)
        balance_log = on_all_ranks(ValueError, lambda: BalanceLog(folder, host.rank, from_step=progress.steps), group)
        balancer.on_update = balance_log
        is_timed_alike = progress.timed_settings == timed_settings(config)
        clock = StepClock(host.device, progress.step_seconds if is_timed_alike else ())
        run = Run(config, host, balancer, train, test, progress, clock, balance_log)
        run.recorder = on_first_rank(ValueError, lambda: _recorder(run), group)
        run.held = held.pop_all()
    return run


def timed_settings(config: RunConfig) -> dict[str, Any]:
    """Return what can change the time of a step, by ``section.key``: not where output goes or how long a run is."""
    untimed = ("training.epochs", "timeout_s")
    settings = flat_settings(READER.to_dict(config))
    return {key: value for key, value in settings.items() if key not in untimed and not key.startswith("output.")}


def _recorder(run: Run) -> Recorder:
    return Recorder(
        run.config,
        num_ranks=run.host.num_ranks,
        from_epoch=run.progress.epochs,
        from_step=run.progress.steps,
        total_steps=run.total_steps,
        commits=run.progress.commits,
    )
