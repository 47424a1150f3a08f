"""Trains a small GPT in a pipeline whose layers move.

    torchrun --nproc-per-node 2 -m lm_examples.train --config early_exit

The loop is :func:`train`; what balancing adds to an ordinary one are ``PipelineBalancer`` and the block
``with balancer.step()``. ``--dry-run`` checks a configuration on any machine, without torchrun.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from lm_examples.config import RunConfig
from lm_examples.config_file import READER
from lm_examples.data import load_text
from lm_examples.dry_run import dry_run
from lm_examples.recorder import summary_table
from lm_examples.run import Run, prepare
from vit_examples.harness.all_ranks import leave_together, of_all_ranks
from vit_examples.harness.checkpoint_files import save_checkpoint
from vit_examples.harness.program import join, require_torchrun, run_program
from vit_examples.harness.run_folder import checkpoint_folder
from vit_examples.harness.step_clock import num_settling
from zeroresize.pipeline import clip_grad_norm_


def train(run: Run) -> dict[str, Any]:
    """All steps that are left; returns the summary that rank 0 writes, on every rank that is not released meanwhile."""
    training, output = run.config.training, run.config.output
    with run.recorder or nullcontext():
        run.clock.start()
        while run.step < training.steps:
            run.step += 1
            train_step(run)
            if run.pipeline.is_released:
                break
            is_validated = training.is_validated_after(run.step)
            is_saved = output.save_every and run.step % output.save_every == 0
            if is_validated or run.step % training.log_every == 0:
                report(run, is_validated=is_validated)
            if is_saved:
                folder = checkpoint_folder(run.config)
                save_checkpoint(
                    folder,
                    run.saved_state(),
                    run.pipeline,
                    run.optimizer,
                    keep=output.keep,
                    process_group=run.pipeline.process_group,
                )
            if is_validated or is_saved:
                run.clock.start()
        summary = {} if run.pipeline.is_released else summary_of(run)
        if run.recorder is not None:
            run.recorder.close(summary, summary_table(run.recorder.title, summary))
    return summary


def train_step(run: Run) -> None:
    """Forward, backward and the optimizer's step; between them layers may move, and this rank may be released."""
    run.pace.chi = run.config.straggler.chi_of(run.step, run.first_stage)
    inputs, target = run.batches.training(run.step)
    run.optimizer.zero_grad()
    with _balanced(run):
        loss = run.pipeline.step(inputs, target=target)
        step_loss = None if loss is None else loss.item()
        if run.config.repack.is_on:  # the last stage may be released with what it knows
            step_loss = of_all_ranks(step_loss, run.pipeline.process_group)[-1]
    if run.pipeline.is_released:
        return
    if run.config.training.grad_clip > 0.0:
        clip_grad_norm_(run.pipeline, run.config.training.grad_clip)
    run.optimizer.step()
    is_last_stage = run.pipeline.stage == run.pipeline.num_stages - 1
    has_changed = run.case.after_step(run.pipeline, run.optimizer, run.step, step_loss if is_last_stage else None)
    if has_changed and run.balancer is not None:
        run.balancer.profile_next()
    run.losses += [] if step_loss is None else [step_loss]
    run.clock.tick()
    if run.recorder is not None:
        run.recorder.step()


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss of the held-out batches, on every rank; collective."""
    losses: list[float] = []
    run.pipeline.layers.eval()
    for number in range(run.config.training.validation_batches):
        inputs, target = run.batches.validation(number)
        outputs = run.pipeline.evaluate(inputs)
        if outputs is not None:
            losses.append(run.case.loss(outputs, target).item())
    run.pipeline.layers.train()
    return _mean(of_all_ranks(losses, run.pipeline.process_group)[-1])


def report(run: Run, *, is_validated: bool) -> None:
    """Bring the stages' numbers together, and write them; collective."""
    num_steps, own_s = run.clock.num_since_lap, run.clock.lap()
    idle = 1.0 - run.pace.lap() / (num_steps * own_s) if run.pace.sleeps_for_work and num_steps else math.nan
    of_stage = run.losses, run.case.figures(run.pipeline), idle  # of training: validation may change them
    validation = {}
    if is_validated:
        validation["validation_loss"] = run.validation_loss = validate(run)
    of_stages = of_all_ranks(of_stage, run.pipeline.process_group)
    run.loss = _mean(of_stages[-1][0])
    by_name: dict[str, list[float]] = {}
    for _, figures, _ in of_stages:
        for name, value in figures.items():
            by_name.setdefault(name, []).append(value)
    run.figures = {name: _mean(values) for name, values in by_name.items()}
    run.losses.clear()
    if run.recorder is not None:
        numbers = {"loss": run.loss, "step_s": own_s, "boundaries": run.pipeline.boundaries, **validation}
        if run.pace.sleeps_for_work:
            numbers["bubble_ratio"] = _mean([idle for *_, idle in of_stages])
        run.recorder.metrics(run.step, {**numbers, "figures": run.figures})


def summary_of(run: Run) -> dict[str, Any]:
    """What a run has come to; seconds are those of this rank's steps, the first of which is left out."""
    seconds = run.clock.seconds[num_settling(run.clock.seconds, 1) :]
    training = run.config.training
    tokens = training.batch_size * run.config.model.context
    return {
        "steps": run.step,
        "step_s": statistics.median(seconds) if seconds else math.nan,
        "mean_step_s": _mean(seconds),
        "tokens_per_s": tokens / _mean(seconds),
        "loss": run.loss,
        "validation_loss": run.validation_loss,
        "bubble_ratio": math.nan if run.recorder is None else run.recorder.bubble_ratio,
        "moves": 0 if run.recorder is None else run.recorder.num_moves,
        "boundaries": run.pipeline.boundaries,
        "figures": run.figures,
    }


def _balanced(run: Run) -> AbstractContextManager[None]:
    return nullcontext() if run.balancer is None else run.balancer.step()


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see :func:`vit_examples.harness.program.run_program`."""
    run_program(arguments, READER, dry_run=dry_run, prepare=_prepare, train=train, leave=_leave, unit="steps")


def _prepare(config: RunConfig, resume: bool) -> Run:
    require_torchrun("lm_examples.train --config small")
    config.validate_stages(int(os.environ["WORLD_SIZE"]))
    text = load_text(config)
    return prepare(config, text, join(config.pipeline.timeout_s), resume=resume)


def _leave(run: Run) -> None:
    run.held.close()
    if run.config.repack.is_on:  # released ranks have left
        dist.destroy_process_group()
    else:
        leave_together()


if __name__ == "__main__":
    main()
