"""Everything of one run on one rank: what it is made of, and what it goes on from."""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lm_examples.build import build_layers, first_boundaries
from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.checkpoint import SavedState, Unwritten
from lm_examples.config import RunConfig
from lm_examples.config_file import READER
from lm_examples.counted_blocks import CountedBlocks
from lm_examples.data import Batches, Text, batches_of
from lm_examples.pace import Pace
from lm_examples.recorder import Recorder
from vit_examples.harness.all_ranks import of_all_ranks, on_all_ranks, on_first_rank
from vit_examples.harness.begin_run import begin_run
from vit_examples.harness.checkpoint_files import load_checkpoint
from vit_examples.harness.run_folder import as_json
from vit_examples.harness.step_clock import StepClock
from zeroresize.pipeline import Pipeline, PipelineBalancer, ProfileRecord, RebalancingRecord


@dataclass
class Run:
    """What :func:`lm_examples.train.train` trains; made by :func:`prepare`.

    Attributes:
        first_stage: this rank's stage when the run began; re-packing may renumber the pipeline's.
        balancer: None where nothing moves.
        step: how many are done.
        recorder: on stage 0, None on the others.
        losses: on the last stage, of the steps since the last logged one.
        loss, validation_loss, figures: the newest ones, on every rank.
        held: what keeps other runs out of the output folder; close it when all is written.
    """

    config: RunConfig
    case: DynamicCase
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    batches: Batches
    pace: Pace
    clock: StepClock
    first_stage: int
    step: int = 0
    balancer: PipelineBalancer | None = None
    recorder: Recorder | None = None
    losses: list[float] = field(default_factory=list)
    loss: float = math.nan
    validation_loss: float = math.nan
    figures: dict[str, float] = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def num_done(self) -> int:
        """How many steps are trained."""
        return self.step

    def tell(self, record: RebalancingRecord | ProfileRecord) -> None:
        """What the balancer has done or measured."""
        if self.recorder is not None:
            self.recorder.balance(self.step, record)

    def saved_state(self) -> SavedState:
        """What of this run is no tensor of its layers; collective."""
        slept_s = self.pace.since_lap_s if self.pace.sleeps_for_work else 0.0
        of_stages = of_all_ranks((self.losses, self.clock.since_lap(), slept_s), self.pipeline.process_group)
        unwritten = Unwritten(of_stages[-1][0], of_stages[0][1], statistics.fmean(one for *_, one in of_stages))
        return SavedState(
            layout_of(self.config),
            self.step,
            self.config.pipeline.boundaries,
            self.pipeline.boundaries,
            None if self.balancer is None else self.balancer.state_dict(),
            self.case.state_dict(),
            unwritten,
        )


def prepare(config: RunConfig, text: Text, process_group: ProcessGroup, *, resume: bool) -> Run:
    """Build the pipeline, and continue where asked to; collective.

    Raises:
        ValueError: on every rank, for anything a user can mend, naming it.
    """
    config.validate_stages(dist.get_world_size(process_group))
    begun = begin_run(
        READER,
        config,
        process_group,
        layout=layout_of(config),
        kind=SavedState,
        resume=resume,
        digests={"the text to train on": text.digest},
    )
    with begun.held as held:
        checkpoint, saved = begun.saved or (None, None)
        run = _build(config, text, process_group, saved)
        if checkpoint is not None and saved is not None:
            load_checkpoint(checkpoint, run.pipeline, run.optimizer, process_group=process_group)
            on_all_ranks(ValueError, lambda: _go_on(run, saved), process_group)
        run.recorder = on_first_rank(
            ValueError, lambda: Recorder(config, num_stages=run.pipeline.num_stages, from_step=run.step), process_group
        )
        run.held = held.pop_all()
    return run


def layout_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint's tensors depend on; as JSON has it."""
    values = READER.to_dict(config)
    layout = {"model": values["model"], "dtype": config.training.dtype, "case": values["case"]}
    return as_json(layout)


def _build(config: RunConfig, text: Text, process_group: ProcessGroup, saved: SavedState | None) -> Run:
    case = config.make_case()
    layers = build_layers(config, case)
    pipeline = Pipeline(
        layers,
        case.loss,
        num_microbatches=config.training.micro_batches,
        process_group=process_group,
        boundaries=_boundaries(config, layers, dist.get_world_size(process_group), saved),
        schedule=config.pipeline.schedule,
    )
    training, balance = config.training, config.balance
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    pace = Pace(config.sleep.forward_s)
    pace.hold_up(layers[1:-1])
    unwritten = Unwritten() if saved is None else saved.unwritten
    clock = StepClock(pipeline.device, since_lap=unwritten.seconds)
    run = Run(config, case, pipeline, optimizer, batches_of(config, text), pace, clock, pipeline.stage)
    if balance.is_on:
        run.balancer = PipelineBalancer(
            pipeline,
            optimizer,
            profile_every=balance.profile_every,
            max_measuring=math.inf if balance.max_measuring is None else balance.max_measuring,
            count_work=CountedBlocks(layers[1:-1]) if case.changes_every_step and balance.count_work == "on" else None,
            by=balance.by,
            memory_limits=balance.memory_limits,
            min_saving=balance.min_saving,
            on_change=run.tell,
            on_profile=run.tell,
            repack=config.repack.options(),
        )
    return run


def _boundaries(
    config: RunConfig, layers: list[torch.nn.Module], num_stages: int, saved: SavedState | None
) -> tuple[int, ...]:
    """Those of the checkpoint, where it is of as many stages and nobody has chosen others since."""
    chosen = config.pipeline.boundaries
    if saved is not None and len(saved.boundaries) == num_stages + 1:
        before = tuple(saved.chosen) if isinstance(saved.chosen, list) else saved.chosen
        if before == chosen:
            return saved.boundaries
    return first_boundaries(config, layers, num_stages)


def _go_on(run: Run, saved: SavedState) -> None:
    """Take over what is no tensor."""
    run.case.load_state_dict(saved.case)
    if run.balancer is not None and saved.balancer is not None:
        run.balancer.load_state_dict(saved.balancer)
    run.step = saved.step
    run.pace.since_lap_s = saved.unwritten.slept_s
    if run.pipeline.stage == run.pipeline.num_stages - 1:
        run.losses = list(saved.unwritten.losses)
