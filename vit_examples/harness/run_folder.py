"""A run's output folder: whether it may write there, alone, and what was trained there before."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vit_examples.harness.file_lock import locked
from vit_examples.harness.plain_files import read_values
from zeroresize.config.paper import dotted


def checkpoint_folder(config: Any) -> Path:
    """Where a run keeps its checkpoints, whose configuration has ``output.folder``."""
    return Path(config.output.folder) / "checkpoints"


@contextmanager
def claimed(config: Any) -> Iterator[None]:
    """Make the output folder; within such a block it can be written to, and is this run's alone.

    Raises:
        ValueError: naming the folder, if it is no such folder, or another run has it.
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


def changed_settings(config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Say how a configuration differs from the ``config.json`` of its output folder, apart from where its output goes.

    Args:
        settings: plain values of ``config``, by ``section.key``, as :func:`flat_settings` gives them.
    """
    try:
        saved = flat_settings(read_values(Path(config.output.folder) / "config.json"))
    except ValueError:  # not written yet, or cut off by a crash
        return []
    return [
        f"{key} {json.dumps(saved[key])} → {json.dumps(value)}"
        for key, value in settings.items()
        if key in saved and saved[key] != value and not key.startswith("output.")
    ]


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a configuration by ``section.key``, as JSON has them; others by their bare name."""
    flat: dict[str, Any] = {}
    for name, value in as_json(values).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": entry for key, entry in dotted(value).items()}
        else:
            flat[name] = value
    return flat


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values as they are read back from JSON: tuples are lists, and keys are texts."""
    return json.loads(json.dumps(values))
