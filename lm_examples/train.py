"""Trains a small language model: in a pipeline whose layers move, under strategies, or in planned micro-batches.

    torchrun --nproc-per-node 2 -m lm_examples.train --config early_exit
    torchrun --nproc-per-node 4 -m lm_examples.train --config switching
    torchrun --nproc-per-node 2 -m lm_examples.train --config gpt

The loop is :func:`train`. What the package adds to an ordinary step stands in ``pipeline_feed.py``,
``switching/feed.py`` and ``microbatches/feed.py``. ``--dry-run`` checks a configuration, without torchrun.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

# Ctrl-C while torch is imported: end without a traceback
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch.distributed as dist
from rich.table import Table
from torch.distributed import ProcessGroup
from torch.distributed.elastic.multiprocessing.errors import record

from lm_examples.config import READER
from lm_examples.data import Files, read_files
from lm_examples.feed import Feed
from lm_examples.microbatches.feed import MicroBatchFeed
from lm_examples.pipeline_feed import PipelineFeed
from lm_examples.switching.feed import StrategyFeed
from vit_examples.harness.checkpoints import load_checkpoint, save_checkpoint
from vit_examples.harness.dry_run import show_needs
from vit_examples.harness.program import agreed, join, leave_together, left_together, noted_sigterm, run_program
from vit_examples.harness.run_folder import RunRecord, begin_run, how_to_go_on, say_end
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import digits

FEEDS: dict[str, type[Feed]] = {"pipeline": PipelineFeed, "strategies": StrategyFeed, "microbatches": MicroBatchFeed}


def prepare(
    config: Any, process_group: ProcessGroup, held: ExitStack, *, resume: bool, files: Files | None = None
) -> Feed:
    """Build what is trained, and continue where asked to; collective.

    Args:
        held: keeps other runs out of the output folder until it is closed.
        files: of which a run is trained; None for those of ``config.data``.

    Raises:
        ValueError: on every rank, for anything a user can mend, naming it.
    """
    config.validate_ranks(dist.get_world_size(process_group))
    kind = FEEDS[config.feed]
    text = agreed(lambda: files or read_files(config.data), process_group)
    batches = agreed(lambda: kind.batches_of(config, text), process_group)
    layout = kind.layout_of(config)
    resumed = begin_run(config, layout, process_group, held, resume=resume, digest=text.digest)
    checkpoint, state = resumed or (None, None)
    feed = kind(config, batches, process_group, state)
    if checkpoint is not None and state is not None:
        balancer = feed.balancer if state["balanced"] else None
        load_checkpoint(checkpoint, (feed.model, feed.optimizer), process_group=process_group, balancer=balancer)
        agreed(lambda: feed.load_state(state), process_group)
    files = {name: ("step", feed.step) for name in ("metrics", *feed.files)}

    def made() -> RunRecord:
        return RunRecord(config, feed.title, num_steps=config.training.steps, num_done=feed.step, files=files)

    feed.record = agreed(made, process_group, first_only=True)
    return feed


def train(feed: Feed) -> dict[str, Any]:
    """All steps that are left; returns the summary that rank 0 writes, empty on a released rank and after SIGTERM."""
    training, output = feed.config.training, feed.config.output
    with feed.record or nullcontext(), noted_sigterm() as is_noted:
        if feed.record is not None:
            feed.begin()
        while feed.step < training.steps:
            feed.step += 1
            numbers = feed.train_step()
            if numbers is None:
                return {}
            feed.count(numbers)
            if feed.record is not None:
                feed.record.step()
            is_validated = training.is_validated_after(feed.step)
            if is_validated or feed.step % training.log_every == 0:
                report(feed, is_validated=is_validated)
            is_ended, is_saved = is_noted(feed.process_group), True
            if is_ended or (output.save_every and feed.step % output.save_every == 0):
                is_saved = save(feed)
            if is_ended and feed.step < training.steps:
                say_end(feed.config, feed.step, is_saved=is_saved)
                return {}
        losses = {"loss": feed.loss, "validation_loss": feed.validation_loss}
        summary = {"steps": feed.step, **feed.summary(), **losses}
        if feed.record is not None:
            feed.record.tell(table_of(feed.title, summary))
    if feed.record is not None:
        feed.record.close(summary)
    return summary


def report(feed: Feed, *, is_validated: bool) -> None:
    """Bring the ranks' numbers together, and write and show them; collective."""
    numbers = feed.numbers()
    feed.loss = numbers["loss"]
    if is_validated:
        numbers["validation_loss"] = feed.validation_loss = feed.validate()
    if feed.record is not None:
        feed.record.write("metrics", {"step": feed.step, **numbers})
        shown = [f"{name} {digits(value, 4)}" for name, value in numbers.items() if isinstance(value, float)]
        feed.record.tell(f"step {feed.step}: {', '.join(shown)}")


def save(feed: Feed) -> bool:
    """Write a checkpoint; returns whether it was written, on every rank; collective."""
    done, state = {"step": feed.step}, {**feed.state(), "balanced": feed.balancer is not None}
    tensors, group = (feed.model, feed.optimizer), feed.process_group
    return save_checkpoint(feed.config, done, state, tensors, process_group=group, balancer=feed.balancer)


def table_of(title: str, summary: dict[str, Any]) -> Table:
    """What a run has come to, a row a number; of mappings and lists a row an entry."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    for name, value in summary.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        for key, entry in entries:
            table.add_row(f"{name} {key}".strip(), digits(entry, 5) if isinstance(entry, float) else str(entry))
    return table


def dry_run(config: Any, num_ranks: int) -> None:
    """Check ``config`` for so many ranks and print, on rank 0 if under torchrun, what each of them needs."""
    config.validate_ranks(num_ranks)
    kind = FEEDS[config.feed]
    kind.batches_of(config, read_files(config.data))
    needs, notes = kind.needs_of(config, num_ranks)
    show_needs(f"{config.feed}, {config.training.dtype}", needs, notes)


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see :func:`vit_examples.harness.program.run_program`."""
    run_program(arguments, READER, dry_run=dry_run, run=_run, hint=how_to_go_on)


def _run(config: Any, *, resume: bool) -> None:
    config.validate_ranks(int(os.environ["WORLD_SIZE"]))
    with ExitStack() as held:
        with Progress("set-up", is_shown=config.output.progress and os.environ["RANK"] == "0"):
            feed = prepare(config, join(getattr(config, FEEDS[config.feed].section).timeout_s), held, resume=resume)

        def leave() -> None:
            feed.leave()
            if feed.process_group.size() < dist.get_world_size():  # released ranks have left
                dist.destroy_process_group()
            else:
                leave_together()

        with left_together(leave):
            if feed.step < config.training.steps:
                train(feed)
            elif feed.record is not None:
                print(f"nothing to do: the checkpoint has {feed.step} steps, training.steps asks for no more")


if __name__ == "__main__":
    main()
