"""Everything of one run on one rank: what it is made of, and what it goes on from."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lm_examples.documents import Documents, MiniBatches
from lm_examples.llama import llama_layers, token_loss
from lm_examples.switching.checkpoint import SavedState
from lm_examples.switching.config import RunConfig
from lm_examples.switching.config_file import READER
from lm_examples.switching.dry_run import needs_of, require_memory
from lm_examples.switching.recorder import Recorder
from lm_examples.switching.search import Choice, chosen
from lm_examples.switching.step_numbers import StepSums
from vit_examples.harness.all_ranks import on_first_rank
from vit_examples.harness.begin_run import begin_run
from vit_examples.harness.checkpoint_files import load_checkpoint
from vit_examples.harness.run_folder import as_json
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer


@dataclass
class Run:
    """What :func:`lm_examples.train_strategies.train` trains; made by :func:`prepare`.

    Attributes:
        choice: of ranges and the optimizer's strategy.
        step: how many are done.
        recorder: on the first rank, None on the others.
        unwritten: the steps since the last line of ``metrics.jsonl``.
        settled: the steps of this process without the first one, ``has_settled`` once that is over.
        loss, validation_loss: the newest ones.
        held: what keeps other runs out of the output folder; close it when all is written.
    """

    config: RunConfig
    choice: Choice
    model: SwitchableModel
    optimizer: torch.optim.Optimizer
    trainer: StrategyTrainer
    batches: MiniBatches
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
        return SavedState(layout_of(self.config), self.step, self.unwritten.to_dict())


def prepare(config: RunConfig, documents: Documents, process_group: ProcessGroup, *, resume: bool) -> Run:
    """Build the model, and continue where asked to; collective.

    Raises:
        ValueError: on every rank, for anything a user can mend, naming it.
    """
    num_ranks = dist.get_world_size(process_group)
    config.validate_ranks(num_ranks)
    if not config.strategies.search and config.strategies.memory_limit is not None:
        require_memory(config, needs_of(config, num_ranks))
    begun = begin_run(
        READER,
        config,
        process_group,
        layout=layout_of(config),
        kind=SavedState,
        resume=resume,
        digests={"the text to train on": documents.digest},
    )
    with begun.held as held:
        run = _build(config, documents, process_group)
        if begun.saved is not None:
            checkpoint, state = begun.saved
            load_checkpoint(checkpoint, run.model, run.optimizer, process_group=process_group)
            run.step = run.trainer.num_steps = state.step
            run.unwritten = StepSums.from_dict(state.unwritten)
        run.recorder = on_first_rank(
            ValueError, lambda: Recorder(config, run.choice, num_ranks=num_ranks, from_step=run.step), process_group
        )
        run.held = held.pop_all()
    return run


def layout_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint's tensors depend on; as JSON has it. Strategies are not among it."""
    layout = {"model": READER.to_dict(config)["model"], "dtype": config.training.dtype}
    return as_json(layout)


def _build(config: RunConfig, documents: Documents, process_group: ProcessGroup) -> Run:
    training = config.training
    torch.manual_seed(training.seed)
    layers = [one.to(getattr(torch, training.dtype)) for one in llama_layers(config.model)]
    batches = MiniBatches(documents, tokens=training.tokens, seed=training.seed)
    shows_progress = config.output.progress and dist.get_rank(process_group) == 0

    def tell(line: str) -> None:
        if shows_progress:
            print(line, flush=True)

    choice = chosen(config, layers, batches, process_group, tell)
    strategies = list(dict.fromkeys(one.strategy for one in choice.ranges))
    model = SwitchableModel(
        layers,
        strategies=strategies,
        process_group=process_group,
        optimizer_strategy=choice.optimizer_strategy,
        compute_dtype=None if training.compute_dtype is None else training.computing_dtype,
        gradient_dtype=None if training.gradient_dtype is None else getattr(torch, training.gradient_dtype),
    )
    # As a group, which may be empty: a rank the optimizer's strategy leaves out has no parameters.
    groups = [{"params": list(model.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, weight_decay=training.weight_decay)
    trainer = StrategyTrainer(
        model,
        optimizer,
        choice.ranges,
        loss=token_loss,
        max_tokens=training.max_tokens,
        grad_clip=training.grad_clip,
        overlap=config.strategies.overlap,
        seed=training.seed,
    )
    return Run(config, choice, model, optimizer, trainer, batches)
