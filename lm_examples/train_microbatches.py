"""Trains a small GPT- or T5-like model on samples of very different lengths, in micro-batches that are planned ahead.

    torchrun --nproc-per-node 2 -m lm_examples.train_microbatches --config gpt

The loop is :func:`train`; what planning adds to an ordinary one are ``RunPlanners``, which plan in processes of their
own, and ``MicroBatchTrainer``. ``--dry-run`` checks a configuration on any machine, without torchrun.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch.distributed.elastic.multiprocessing.errors import record

from lm_examples.microbatches.config import RunConfig
from lm_examples.microbatches.config_file import READER
from lm_examples.microbatches.dry_run import dry_run
from lm_examples.microbatches.recorder import summary_table
from lm_examples.microbatches.run import Run, load_samples, prepare
from lm_examples.microbatches.step_sums import StepSums
from vit_examples.harness.all_ranks import leave_together
from vit_examples.harness.checkpoint_files import save_checkpoint
from vit_examples.harness.program import join, require_torchrun, run_program
from vit_examples.harness.run_folder import checkpoint_folder


def train(run: Run) -> dict[str, Any]:
    """All steps that are left; returns the summary that rank 0 writes, on every rank."""
    training, output = run.config.training, run.config.output
    with run.recorder or nullcontext():
        while run.step < training.steps:
            train_step(run)
            is_validated = training.is_validated_after(run.step)
            if is_validated or run.step % training.log_every == 0:
                report(run, is_validated=is_validated)
            if output.save_every and run.step % output.save_every == 0:
                save_checkpoint(
                    checkpoint_folder(run.config),
                    run.saved_state(),
                    run.model,
                    run.optimizer,
                    keep=output.keep,
                    process_group=run.model.process_group,
                )
        summary = summary_of(run)
        if run.recorder is not None:
            run.recorder.close(summary, summary_table(run.recorder.title, summary))
    return summary


def train_step(run: Run) -> None:
    """One mini-batch, by its plan, and one step of the optimizer."""
    lengths = run.samples.lengths(run.step)
    tokens = int(lengths.sum())
    run.pace.chi = run.config.straggler.chi_of(run.step + 1, run.model.rank)
    trainer = run.balancer or run.trainer
    report = trainer.step(run.samples.training(run.step), lengths)
    run.step += 1
    run.unwritten.add(report, tokens)
    if run.has_settled or run.step == run.config.training.steps:  # the first step of a process is not timed
        run.settled.add(report, tokens)
    run.has_settled = True
    if run.recorder is not None:
        run.recorder.step()


def validate(run: Run) -> float:
    """Mean loss of a held-out token; collective."""
    losses = [
        run.trainer.evaluate(
            run.samples.held_out(number), run.samples.lengths.held_out(number), run.config.training.tokens
        )
        for number in range(run.config.training.validation_batches)
    ]
    return statistics.fmean(losses)


def report(run: Run, *, is_validated: bool) -> None:
    """Write what the steps since the last line were; collective where it validates."""
    numbers = run.unwritten.means()
    run.unwritten = StepSums()
    run.loss = numbers["loss"]
    if is_validated:
        numbers["validation_loss"] = run.validation_loss = validate(run)
    if run.recorder is not None:
        run.recorder.metrics(run.step, numbers)


def summary_of(run: Run) -> dict[str, Any]:
    """What a run has come to; seconds are means over this process's steps, without the first one if there are more."""
    planned_s = list(run.planners.seconds().values())
    return {
        **run.settled.means(),
        "planning_s": statistics.fmean(planned_s) if planned_s else float("nan"),
        "steps": run.step,
        "loss": run.loss,
        "validation_loss": run.validation_loss,
    }


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see :func:`vit_examples.harness.program.run_program`."""
    run_program(arguments, READER, dry_run=dry_run, prepare=_prepare, train=train, leave=_leave, unit="steps")


def _prepare(config: RunConfig, resume: bool) -> Run:
    require_torchrun("lm_examples.train_microbatches --config gpt")
    config.validate_ranks(int(os.environ["WORLD_SIZE"]))
    samples = load_samples(config)
    return prepare(config, samples, join(config.parallel.timeout_s), resume=resume)


def _leave(run: Run) -> None:
    run.held.close()
    if run.balancer is not None:
        run.balancer.close()
    run.planners.close()
    run.store.close()
    leave_together()


if __name__ == "__main__":
    main()
