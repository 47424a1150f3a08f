"""Whether a run may write into its output folder, alone, and what it continues from there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vit_examples.checkpoint import EPOCHS, SavedState, layout_of
from vit_examples.config import RunConfig
from vit_examples.config_file import READER
from vit_examples.harness.checkpoint_files import read_saved_state
from vit_examples.harness.file_lock import locked
from vit_examples.harness.plain_files import read_values
from zeroresize.config.paper import dotted


def checkpoint_folder(config: Any) -> Path:
    """Where a run keeps its checkpoints, whose configuration has ``output.folder``."""
    return Path(config.output.folder) / "checkpoints"


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """The output folder is made, can be written to, and is this run's alone within such a block, on rank 0.

    Raises:
        ValueError: naming the folder, if it is no such folder, or another run has it.
    """
    if int(os.environ.get("RANK", "0")):
        yield
        return
    with claimed_here(config):
        yield


@contextmanager
def claimed_here(config: Any) -> Iterator[None]:
    """As :func:`claimed`, whatever rank this is.

    Raises:
        ValueError: as there.
    """
    folder = Path(config.output.folder)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if config.output.save_every:
            checkpoint_folder(config).mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    with run_lock(folder):
        yield


def run_lock(folder: Path) -> AbstractContextManager[None]:
    """A block in which no run writes to the output folder ``folder``, and nobody else is in such a block.

    Raises:
        ValueError: naming the folder, if one does.
    """
    return locked(folder / "run.lock", f"output.folder={folder}: another run is writing there")


def empty(*folders: Path) -> None:
    """Make each of ``folders`` an empty one.

    Raises:
        ValueError: naming the folder, if a run is writing in one of them, and nothing was deleted in any; or if one
            cannot be written to.
    """
    with ExitStack() as held:
        for folder in folders:
            with writable(folder):
                folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(run_lock(folder))
        for folder in folders:
            with writable(folder):
                shutil.rmtree(folder)
    for folder in folders:
        folder.mkdir()


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Errors of writing to ``folder`` within such a block are a user's, to be told before training.

    Raises:
        ValueError: naming the folder and the file.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"output.folder={folder}: cannot be written to: {error}") from error


def refuse_earlier_run(config: Any, newest: Path | None) -> None:
    """Raise ValueError where the output folder holds what a run that begins anew would overwrite.

    Args:
        newest: its newest checkpoint, if there is one.
    """
    folder = Path(config.output.folder)
    if newest is not None or (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} holds an earlier run: add --resume, or choose another --output")


def checkpoint_to_resume(config: RunConfig, *, resume: bool) -> tuple[Path, SavedState] | None:
    """Find the newest checkpoint of the output folder if asked for, checked against this run's layout; else None.

    Raises:
        ValueError: if the folder holds an earlier run that would be overwritten, or a checkpoint that does not fit.
    """
    newest = EPOCHS.newest(checkpoint_folder(config))
    if not resume:
        refuse_earlier_run(config, newest)
        return None
    if newest is None:
        _say(f"no checkpoint in {checkpoint_folder(config)}: starting anew")
        return None
    state = read_saved_state(newest, layout_of(config, int(os.environ["WORLD_SIZE"])), SavedState)
    changed = changed_settings(config)
    if changed:
        _say(f"resuming with changed settings: {', '.join(changed)}")
    return newest, state


def changed_settings(config: RunConfig) -> list[str]:
    """How ``config`` differs from the ``config.json`` of its output folder, apart from where its output goes."""
    try:
        saved = _flat(read_values(Path(config.output.folder) / "config.json"))
    except ValueError:  # not written yet, or cut off by a crash
        return []
    return [
        f"{key} {json.dumps(saved[key])} → {json.dumps(value)}"
        for key, value in _settings(config).items()
        if key in saved and saved[key] != value and not key.startswith("output.")
    ]


def timed_settings(config: RunConfig) -> dict[str, Any]:
    """What can change the time of a step, by ``section.key``: all but where output goes and how long a run is."""
    untimed = ("training.epochs", "timeout_s")
    return {
        key: value for key, value in _settings(config).items() if key not in untimed and not key.startswith("output.")
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    """By ``section.key``, as they are read from JSON."""
    return _flat(json.loads(json.dumps(READER.to_dict(config))))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """By ``section.key``; keys outside sections by their own name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": entry for key, entry in dotted(value).items()}
        else:
            flat[name] = value
    return flat


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)
