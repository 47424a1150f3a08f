"""Whether a run may write into its output folder, alone, and what it continues from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_examples.checkpoint import SavedState, newest_checkpoint, read_saved_state, step_of
from lm_examples.config import RunConfig
from lm_examples.config_file import config_to_dict
from vit_examples.run_folder import run_lock, writable


def checkpoint_folder(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.output.folder) / "checkpoints"


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """The output folder is made, can be written to, and is this run's alone within such a block.

    Raises:
        ValueError: naming the folder, if it is no such folder, or another run has it.
    """
    folder = Path(config.output.folder)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if config.output.save_every:
            checkpoint_folder(config).mkdir(exist_ok=True)
    with run_lock(folder):
        yield


def layout_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint's tensors depend on; as JSON has it."""
    values = config_to_dict(config)
    layout = {"model": values["model"], "dtype": config.training.dtype, "case": values["case"]}
    return json.loads(json.dumps(layout))


def to_resume(config: RunConfig, *, resume: bool) -> tuple[Path, SavedState] | None:
    """The newest checkpoint of the output folder if asked for, checked; else None.

    Raises:
        ValueError: if the folder holds an earlier run that would be overwritten, or a checkpoint that does not fit.
    """
    newest = newest_checkpoint(checkpoint_folder(config))
    if not resume:
        folder = Path(config.output.folder)
        if newest is not None or (folder / "metrics.jsonl").exists():
            raise ValueError(f"{folder} holds an earlier run: add --resume, or choose another --output")
        return None
    return None if newest is None else (newest, read_saved_state(newest, layout_of(config)))


def how_to_go_on(config: RunConfig) -> str:
    """What goes on from where, by what is in the run's output folder now."""
    newest = newest_checkpoint(checkpoint_folder(config))
    if newest is not None:
        done = f"step {step_of(newest)} of {config.training.steps}"
        return f"the same command with --resume goes on after {done}, from {newest}"
    why = f"output.save_every={config.output.save_every}"
    return f"no checkpoint is written yet ({why}); the same command with --resume begins anew"
