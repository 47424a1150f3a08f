"""Trains a vision transformer with balanced tensor parallelism.

    torchrun --nproc-per-node 2 -m vit_examples.train --config demo --mode zero-rd

The loop is :func:`train_epoch`; what this package adds to an ordinary loop are ``zr.convert``, ``zr.Balancer`` and
``balancer.step()``. ``--dry-run`` checks a configuration on any machine, without torchrun.
"""

from __future__ import annotations

import math
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: this folder's modules belong to the package beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from vit_examples.checkpoint import Progress
from vit_examples.config_file import READER
from vit_examples.data import test_batches, training_batches
from vit_examples.dry_run import dry_run
from vit_examples.harness.checkpoint_files import save_checkpoint
from vit_examples.harness.program import run_program
from vit_examples.harness.run_folder import checkpoint_folder
from vit_examples.model import classification_loss, num_correct
from vit_examples.run import Run, prepare
from vit_examples.step_times import timing
from vit_examples.straggling import stragglers


def train(run: Run) -> dict[str, Any]:
    """All epochs that are left; returns (on every rank) the summary that rank 0 writes."""
    config, host = run.config, run.host
    accuracy = math.nan
    with stragglers(config.straggler, host, run.balancer) as slow, run.recorder or nullcontext():
        for epoch in range(run.progress.epochs, config.training.epochs):
            slow.set_epoch(epoch)
            loss = train_epoch(run, epoch)
            if config.balance.iters_per_epoch is None:
                run.balancer.epoch_end()
            run.balance_log.epoch(run.balancer)
            accuracy = evaluate(run)
            report_epoch(run, epoch, loss, accuracy)
            run.progress = Progress(epoch + 1, run.progress.steps + run.steps_per_epoch)
            if config.output.save_every and (epoch + 1) % config.output.save_every == 0:
                save_checkpoint(
                    checkpoint_folder(config),
                    run.saved_state(),
                    host.model,
                    host.optimizer,
                    keep=config.output.keep,
                    balancer=run.balancer,
                )
    summary = {
        **timing(
            run.clock.by_process,
            settle_steps=config.output.settle_steps,
            batch_size=config.training.batch_size,
            steps_per_epoch=run.steps_per_epoch,
        ),
        "test_accuracy": accuracy,
        "epochs": run.progress.epochs,
        "steps": run.progress.steps,
        "steps_timed": sum(map(len, run.clock.by_process)),
        "ranks": host.num_ranks,
        "device": host.device.type,
    }
    run.balance_log.close()
    if run.recorder is not None:
        run.recorder.close(summary)
    return summary


def train_epoch(run: Run, epoch: int) -> float:
    """Train on every batch of an epoch; returns the mean loss.

    Logged are one step in ``output.log_every``, and the last: so the times that are logged hold every step.
    """
    training, host, log_every = run.config.training, run.host, run.config.output.log_every
    losses: list[Tensor] = []
    host.model.train()
    batches = training_batches(
        run.train, training.batch_size, seed=training.seed, epoch=epoch, augment=run.config.data.augment
    )
    run.trace = []
    run.clock.start()
    for number, (images, labels) in enumerate(islice(batches, run.steps_per_epoch)):
        step = run.progress.steps + number
        lr = learning_rate(run, step)
        host.set_lr(lr)
        losses.append(backward(run, images, labels))
        host.step()
        run.balancer.step()
        run.clock.tick()
        if run.recorder is not None:
            run.recorder.step(f"epoch {epoch + 1}")
        if (step + 1) % log_every == 0 or number + 1 == run.steps_per_epoch:
            step_s = run.clock.lap()
            balance = run.balancer.metrics()
            run.trace.append(balance["balance/relieved"])
            if run.recorder is not None:
                run.recorder.metrics(epoch=epoch, step=step, loss=losses[-1], lr=lr, step_s=step_s, balance=balance)
    return torch.stack(losses).mean().item()


def backward(run: Run, images: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward of one optimizer step, micro-batch by micro-batch; returns the mean loss, detached."""
    accumulation, num_labels = run.config.training.accumulation, run.config.model.num_labels
    total = torch.zeros((), device=run.host.device)
    for micro_images, micro_labels in zip(images.chunk(accumulation), labels.chunk(accumulation), strict=True):
        logits = run.host.forward(micro_images.to(run.host.device, non_blocking=True))
        labels_here = micro_labels.to(run.host.device, non_blocking=True)
        loss = classification_loss(logits, labels_here, num_labels) / accumulation
        run.host.backward(loss)
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Share of the test pictures that are classified rightly, computed in full."""
    run.host.model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=run.host.device)
    for images, labels in test_batches(run.test, run.config.training.batch_size):
        logits = run.host.forward(images.to(run.host.device))
        correct += num_correct(logits, labels.to(run.host.device), run.config.model.num_labels)
    return correct.item() / len(run.test)


def report_epoch(run: Run, epoch: int, loss: float, accuracy: float) -> None:
    """Bring the ranks' ratios together and write and show the epoch; collective."""
    of_this_rank = (run.trace, run.balancer.metrics()["balance/is_straggler"] > 0)
    gathered: list[Any] = [None] * run.host.num_ranks
    dist.all_gather_object(gathered, of_this_rank, group=run.host.tp_group)
    if run.recorder is None:
        return
    ratios = [list(step) for step in zip(*(trace for trace, _ in gathered), strict=True)]
    slow_ranks = [rank for rank, (_, is_straggler) in enumerate(gathered) if is_straggler]
    seconds = run.clock.seconds[-run.steps_per_epoch :]
    step_ms, mean_step_ms = 1e3 * statistics.median(seconds), 1e3 * statistics.fmean(seconds)
    last_step = run.progress.steps + run.steps_per_epoch - 1
    numbers = {"loss": loss, "step_ms": step_ms, "mean_step_ms": mean_step_ms, "test_accuracy": accuracy}
    each = seconds if run.clock.is_of_each else []
    run.recorder.epoch(epoch=epoch, step=last_step, numbers=numbers, ratios=ratios, seconds=each)
    run.recorder.show_epoch(epoch + 1, loss, step_ms, accuracy, ratios[-1] if ratios else [], slow_ranks)


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to zero."""
    training = run.config.training
    if step < training.warmup_steps:
        return training.lr * (step + 1) / training.warmup_steps
    if training.lr_schedule == "constant":
        return training.lr
    done = (step - training.warmup_steps) / max(1, run.total_steps - training.warmup_steps)
    return training.lr * 0.5 * (1 + math.cos(math.pi * done))


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see :func:`vit_examples.harness.program.run_program`."""
    run_program(arguments, READER, dry_run=dry_run, prepare=prepare, train=train, leave=_leave, unit="epochs")


def _leave(run: Run) -> None:
    run.host.close()
    run.held.close()


if __name__ == "__main__":
    main()
