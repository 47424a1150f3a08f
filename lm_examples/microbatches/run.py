"""Everything of one run on one rank: what it is made of, and what it goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lm_examples.data import folder_of, read_files
from lm_examples.microbatches.blocks import summed_loss
from lm_examples.microbatches.checkpoint import SavedState
from lm_examples.microbatches.config import RunConfig
from lm_examples.microbatches.config_file import READER
from lm_examples.microbatches.recorder import Recorder
from lm_examples.microbatches.step_sums import StepSums
from lm_examples.microbatches.tasks import TaskSamples
from lm_examples.pace import Pace
from vit_examples.harness.all_ranks import on_all_ranks, on_first_rank
from vit_examples.harness.begin_run import begin_run
from vit_examples.harness.checkpoint_files import load_checkpoint
from vit_examples.harness.run_folder import as_json
from zeroresize.microbatch.balancer import MicroBatchBalancer
from zeroresize.microbatch.cost_table import CostTable
from zeroresize.microbatch.iteration_planner import IterationPlanner
from zeroresize.microbatch.measured_table import measure_model
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.profile import kinds_of
from zeroresize.microbatch.run_planners import RunPlanners
from zeroresize.microbatch.shared_store import SharedStore, share_store
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.policy.microbatches.micro_batch import MicroBatch
from zeroresize.strategy.model import SwitchableModel


@dataclass
class Run:
    """What :func:`lm_examples.train_microbatches.train` trains; made by :func:`prepare`.

    Attributes:
        samples: of all mini-batches.
        step: how many are done.
        recorder: on the first rank, None on the others.
        pace: of this rank.
        planners: of all hosts.
        balancer: None where slow ranks get as much to do as others.
        unwritten: the steps since the last line of ``metrics.jsonl``.
        settled: the steps of this process without the first one, ``has_settled`` once that is over.
        loss, validation_loss: the newest ones.
        held: what keeps other runs out of the output folder; close it when all is written.
    """

    config: RunConfig
    samples: TaskSamples
    model: SwitchableModel
    optimizer: torch.optim.Optimizer
    trainer: MicroBatchTrainer
    pace: Pace
    store: SharedStore
    planners: RunPlanners
    balancer: MicroBatchBalancer | None = None
    step: int = 0
    recorder: Recorder | None = None
    unwritten: StepSums = field(default_factory=StepSums)
    settled: StepSums = field(default_factory=StepSums)
    has_settled: bool = False
    loss: float = math.nan
    validation_loss: float = math.nan
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def num_done(self) -> int:
        """How many steps are trained."""
        return self.step

    def saved_state(self) -> SavedState:
        """Return what of this run is no tensor of its model."""
        state = None if self.balancer is None else self.balancer.state_dict()
        return SavedState(layout_of(self.config), self.step, self.unwritten.to_dict(), state)


def load_samples(config: RunConfig) -> TaskSamples:
    """Read the files that a run is trained on.

    Raises:
        ValueError: naming the folder, if there is too little text in it.
    """
    held_out, training = read_files(config.data)
    try:
        return TaskSamples(training, held_out, config.lengths)
    except ValueError as error:
        raise ValueError(f"data.folder={folder_of(config.data)}: {error}") from error


def prepare(config: RunConfig, samples: TaskSamples, process_group: ProcessGroup, *, resume: bool) -> Run:
    """Build the model, measure its layers, start planners, and continue where asked to; collective.

    Raises:
        ValueError: on every rank, for anything a user can mend, naming it.
    """
    config.validate_ranks(dist.get_world_size(process_group))
    begun = begin_run(
        READER,
        config,
        process_group,
        layout=layout_of(config),
        kind=SavedState,
        resume=resume,
        digests={"the text to train on": samples.digest},
    )
    with begun.held as held:
        pace = Pace(seconds_of=_sleeps_of(config) if config.sleep.is_on else None)
        model, optimizer = _model_of(config, pace, process_group)
        state: SavedState | None = None
        if begun.saved is not None:
            checkpoint, state = begun.saved
            load_checkpoint(checkpoint, model, optimizer, process_group=process_group)
        table = _costs_of(config, model, process_group)
        run = _start(config, samples, model, optimizer, pace, table, state)
        run.recorder = on_first_rank(ValueError, lambda: Recorder(config, from_step=run.step), process_group)
        run.held = held.pop_all()
    return run


def layout_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint's tensors depend on; as JSON has it. How the model is spread is not among it."""
    return as_json({"model": READER.to_dict(config)["model"], "dtype": config.training.dtype})


def _model_of(
    config: RunConfig, pace: Pace, process_group: ProcessGroup
) -> tuple[SwitchableModel, torch.optim.Optimizer]:
    training = config.training
    torch.manual_seed(training.seed)
    layers = config.layers()
    if pace.sleeps_for_work or config.straggler.rank is not None:
        pace.hold_up(layer for layer in layers if hasattr(layer, "segments"))
    model = SwitchableModel(layers, strategies=[config.parallel.strategy], process_group=process_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    return model, optimizer


def _sleeps_of(config: RunConfig) -> Any:
    sleep = config.sleep

    def seconds_of(batch: PaddedBatch | PairBatch) -> float:
        rows, *lengths = batch.sizes.values()
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return rows * (sleep.token_s * tokens + sleep.square_s * squares) / len(lengths)

    return seconds_of


def _costs_of(config: RunConfig, model: SwitchableModel, process_group: ProcessGroup) -> CostTable:
    path = config.microbatches.costs
    if path is not None:
        return on_all_ranks(ValueError, lambda: _costs_from(path, config, model), process_group)
    table = measure_model(
        model,
        _batch_kind(config).hollow,
        config.shapes,
        loss=summed_loss,
        recomputations=config.microbatches.recompute,
    )
    folder = Path(config.output.folder)
    on_first_rank(ValueError, lambda: table.save(folder / "costs.json"), process_group)
    return table


def _costs_from(path: str, config: RunConfig, model: SwitchableModel) -> CostTable:
    try:
        table = CostTable.load(path)
        table.require_model(kinds_of(model.whole_layers), config.sizes)
    except (ValueError, OSError) as error:
        raise ValueError(f"microbatches.costs={path}: {error}") from error
    missing = sorted(set(config.microbatches.recompute) - set(table.grids))
    if missing:
        raise ValueError(f"microbatches.costs={path}: nothing is known of recomputing {missing}; measure again")
    return table


def _start(
    config: RunConfig,
    samples: TaskSamples,
    model: SwitchableModel,
    optimizer: torch.optim.Optimizer,
    pace: Pace,
    table: CostTable,
    state: SavedState | None,
) -> Run:
    boundaries = config.parallel.strategy.partition(config.num_layers).boundaries
    grids = {way: table.grids[way] for way in config.microbatches.recompute}
    table = replace(table, grids=grids)
    planner = IterationPlanner(config.lengths, table, boundaries, config.options)
    store = share_store(model.process_group)
    step = 0 if state is None else state.step
    planners = RunPlanners(
        planner,
        store,
        model.process_group,
        model.device,
        first=step,
        last=config.training.steps - 1,
        num_workers=config.microbatches.workers,
        ahead=config.microbatches.ahead,
    )
    kind = _batch_kind(config)
    trainer = MicroBatchTrainer(
        model,
        optimizer,
        planners,
        batch_from=_as_batch(config),
        hollow=kind.hollow,
        sizes=config.sizes,
        loss=summed_loss,
        grad_clip=config.training.grad_clip,
        seed=config.training.seed,
        lengths_of=lambda sample: [len(part) for part in sample] if config.model.kind == "t5" else [len(sample[0]) - 1],
    )
    trainer.num_steps = step
    run = Run(config, samples, model, optimizer, trainer, pace, store, planners, step=step)
    if config.balance.is_on:
        run.balancer = MicroBatchBalancer(
            trainer,
            planners,
            min_saving=config.balance.min_saving,
            on_change=lambda record: run.recorder.change(record) if run.recorder is not None else None,
        )
    if state is not None:
        run.unwritten = StepSums.from_dict(state.unwritten)
        if state.balancer is not None and run.balancer is not None:
            run.balancer.load_state_dict(state.balancer)
    return run


def _batch_kind(config: RunConfig) -> Any:
    return PaddedBatch if config.model.kind == "gpt" else PairBatch


def _as_batch(config: RunConfig) -> Any:
    """Makes micro-batches of samples that are arrays."""

    def batch_from(samples: Sequence[Any], microbatch: MicroBatch) -> PaddedBatch | PairBatch:
        wanted: Mapping[int, tuple[Tensor, ...]] = {
            number: tuple(torch.from_numpy(part) for part in samples[number]) for number in microbatch.samples
        }
        if config.model.kind == "gpt":
            return PaddedBatch.of({number: parts[0] for number, parts in wanted.items()}, microbatch)
        return PairBatch.of({number: (parts[0], parts[1]) for number, parts in wanted.items()}, microbatch)

    return batch_from
