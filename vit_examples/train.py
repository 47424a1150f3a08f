"""Trains a vision transformer with balanced tensor parallelism.

    torchrun --nproc-per-node 2 -m vit_examples.train --config demo --mode zero-rd

The loop is :func:`train_epoch`; what this package adds to an ordinary loop are ``zr.convert``, ``zr.Balancer`` and
``balancer.step()``. ``--dry-run`` checks a configuration on any machine, without torchrun.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, islice

# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from vit_examples.batches import test_batches, training_batches
from vit_examples.config import READER, RunConfig
from vit_examples.dry_run import dry_run
from vit_examples.harness.program import left_together, noted_sigterm, of_all_ranks, run_program
from vit_examples.harness.run_folder import how_to_go_on, say_end
from vit_examples.model import classification_loss, num_correct
from vit_examples.run import Run, commit_of_code, prepare
from vit_examples.step_times import timing
from vit_examples.stragglers import stragglers
from zeroresize.utils.progress import Progress

#: Of whom an epoch's line has the mean share that a rank did not compute, by itself.
MOST_RANKS_SHOWN = 16


def train(run: Run) -> None:
    """All epochs that are left, unless SIGTERM ends the run, and the summary, which rank 0 writes."""
    config, host = run.config, run.host
    accuracy, commit = math.nan, commit_of_code()  # now: by the end the files may be others
    with stragglers(run) as set_epoch, run.record or nullcontext(), noted_sigterm() as is_noted:
        while run.epochs < config.training.epochs:
            set_epoch(run.epochs)
            loss = train_epoch(run, is_noted)
            if loss is None:
                say_end(config, run.steps + len(run.losses), is_saved=run.save())
                break
            if config.balance.iters_per_epoch is None:
                run.balancer.epoch_end()
            run.balance_log.epoch(run.balancer)
            accuracy = evaluate(run)
            run.epochs, run.steps = run.epochs + 1, run.steps + run.steps_per_epoch
            report_epoch(run, loss, accuracy)
            run.losses, run.trace = [], []
            if config.output.save_every and run.epochs % config.output.save_every == 0:
                run.save()
    run.balancer.close()  # which tells its status that it has ended
    run.balance_log.close()
    if run.record is None or run.losses:
        return
    summary = {
        **timing(
            run.clock.by_process,
            settle_steps=config.output.settle_steps,
            batch_size=config.training.batch_size,
            steps_per_epoch=run.steps_per_epoch,
        ),
        "test_accuracy": accuracy,
        "epochs": run.epochs,
        "steps": run.steps,
        "steps_timed": sum(map(len, run.clock.by_process)),
        "ranks": host.num_ranks,
        "device": host.device.type,
        "commit": commit,
    }
    run.record.close(summary)


def train_epoch(run: Run, is_noted: Callable[..., bool]) -> float | None:
    """Train on every batch of an epoch that is left; returns the epoch's mean loss, None where SIGTERM ends the run.

    Logged are one step in ``output.log_every``, and the last: so the times that are logged hold every step.
    """
    training, host, epoch = run.config.training, run.host, run.epochs
    host.model.train()
    batches = training_batches(
        run.train, training.batch_size, seed=training.seed, epoch=epoch, augment=run.config.data.augment
    )
    run.clock.start()
    for number, (images, labels) in islice(enumerate(batches), len(run.losses), run.steps_per_epoch):
        step = run.steps + number
        lr = learning_rate(run, step)
        host.set_lr(lr)
        run.losses.append(backward(run, images, labels))
        host.step()
        run.balancer.step()
        run.clock.tick()
        if run.record is not None:
            run.record.step()
        is_ended = is_noted(host.tp_group)
        if is_ended or number + 1 == run.steps_per_epoch or (step + 1) % run.config.output.log_every == 0:
            step_s, balance = run.clock.lap(), run.balancer.metrics()
            run.trace.append(balance["balance/relieved"])
            if run.record is not None:
                numbers = {"loss": run.losses[-1].item(), "lr": lr, "step_s": step_s, **balance}
                place = {"kind": "step", "epoch": epoch, "step": step, "from_step": run.first_step}
                run.record.write("metrics", {**place, **numbers})
                run.record.plot(numbers, "train/", step)
        if is_ended:
            return None
    return torch.stack(run.losses).mean().item()


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


def report_epoch(run: Run, loss: float, accuracy: float) -> None:
    """Bring the ranks' ratios together, and write and show the epoch that has ended; collective."""
    of_this_rank = (run.trace, run.balancer.metrics()["balance/is_straggler"] > 0)
    gathered = of_all_ranks(of_this_rank, run.host.tp_group)
    if run.record is None:
        return
    ratios = [list(step) for step in zip(*(trace for trace, _ in gathered), strict=True)]
    slow = " ".join(str(rank) for rank, (_, is_straggler) in enumerate(gathered) if is_straggler) or "–"
    seconds = [*chain(*run.clock.by_process)][-run.steps_per_epoch :]
    step_ms, mean_step_ms = 1e3 * statistics.median(seconds), 1e3 * statistics.fmean(seconds)
    numbers = {"loss": loss, "step_ms": step_ms, "mean_step_ms": mean_step_ms, "test_accuracy": accuracy}
    by_rank = list(zip(*ratios, strict=True))[:MOST_RANKS_SHOWN]
    numbers |= {f"ratio_rank{rank}": statistics.mean(shares) for rank, shares in enumerate(by_rank)}
    place = {"kind": "epoch", "epoch": run.epochs - 1, "step": run.steps - 1}
    run.record.write("metrics", {**place, **numbers, "ratios": ratios})
    run.record.plot(numbers, "epoch/", run.steps - 1)
    work = [1.0 - ratio for ratio in ratios[-1]]
    shown = " ".join(f"{share:.2f}" for share in work) if len(work) <= 8 else f"{min(work):.2f}–{max(work):.2f}"
    run.record.tell(
        f"epoch {run.epochs}: loss {loss:.3f}, {step_ms:.0f} ms/step, acc. {accuracy:.1%}, work {shown}, slow {slow}"
    )


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
    run_program(arguments, READER, dry_run=dry_run, run=_run, hint=how_to_go_on)


def _run(config: RunConfig, *, resume: bool) -> None:
    with Progress("set-up", is_shown=config.output.progress and os.environ.get("RANK", "0") == "0"):
        run = prepare(config, resume=resume)
    with run.held, left_together(run.host.close):
        if run.epochs < config.training.epochs:
            train(run)
        elif run.record is not None:
            print(f"nothing to do: the checkpoint has {run.epochs} epochs, training.epochs asks for no more")


if __name__ == "__main__":
    main()
