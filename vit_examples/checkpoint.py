"""Checkpoints of a run: whole folders, of one layout, the newest of which a run continues from.

A folder is written under a temporary name and renamed when complete, so a crash never leaves half a checkpoint that
looks newest. ``layout.json`` says which layout its shards fit, ``progress.json`` how far the run was, ``manifest.json``
what every file is like; each rank has a file of its own for model and optimizer, and two for its balancer. All of them
are safetensors or JSON: loading them runs no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import zeroresize as zr
from vit_examples.all_ranks import do_nothing, of_all_ranks, on_all_ranks
from vit_examples.checkpoint_folders import CheckpointFolders
from vit_examples.config import RunConfig
from vit_examples.host import Host
from vit_examples.manifest import require_intact, sealed, sync_names, write_manifest
from vit_examples.plain_files import read_state, read_values, state_files, write_state, write_values
from zeroresize.utils.value_checks import at_least, is_number, known_keys

_LAYOUT, _PROGRESS = "layout.json", "progress.json"
_FOLDERS = CheckpointFolders("epoch", 4)


@dataclass(frozen=True)
class Progress:
    """How far a run is, and what its summary has to tell of the time before a checkpoint.

    Attributes:
        epochs: completed.
        steps: optimizer steps over all of them.
        step_seconds: of every iteration, one sequence a process that trained.
        timed_settings: what they were timed with (:func:`vit_examples.run_folder.timed_settings`).
        commits: of the code that trained, in order.

    Raises:
        ValueError: for a value of another kind.
    """

    epochs: int = 0
    steps: int = 0
    step_seconds: Sequence[Sequence[float]] = ()
    timed_settings: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 0)
        at_least("steps", self.steps, 0)
        is_told = (
            _is_list(self.step_seconds, lambda own: _is_list(own, is_number))
            and isinstance(self.timed_settings, Mapping)
            and _is_list(self.commits, lambda one: isinstance(one, str))
        )
        if not is_told:
            raise ValueError("step_seconds must be lists of numbers, timed_settings a mapping, commits a list of texts")


def layout_of(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """What a checkpoint's shards depend on."""
    return {
        "host": config.host,
        "tp_size": num_ranks,
        "precision": config.training.precision,
        "model": dataclasses.asdict(config.model),
    }


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the latest epoch under ``folder``."""
    return _FOLDERS.newest(folder)


def epoch_of(checkpoint: Path) -> int:
    """How many epochs had been trained when it was written."""
    return _FOLDERS.number_of(checkpoint)


def require_layout(checkpoint: Path, layout: dict[str, Any]) -> None:
    """Check that ``checkpoint`` fits, before anything of it is loaded.

    Raises:
        ValueError: naming both layouts, or the file that is missing or damaged.
    """
    try:
        require_intact(checkpoint, [_LAYOUT])
        saved = read_values(checkpoint / _LAYOUT)
    except ValueError as error:
        raise ValueError(f"{error}\n{_FOLDERS.way_out(checkpoint)}") from error
    if saved != layout:
        differing = sorted(key for key in saved.keys() | layout.keys() if saved.get(key) != layout.get(key))
        raise ValueError(
            f"{checkpoint} is of another layout ({', '.join(differing)} differ), nothing was loaded.\n"
            f"  checkpoint: {json.dumps(saved)}\n  this run:   {json.dumps(layout)}\n"
            "Resume with the checkpoint's layout, or choose another --output"
        )


def save_checkpoint(
    folder: Path, progress: Progress, *, host: Host, balancer: zr.Balancer, layout: dict[str, Any], keep: int
) -> bool:
    """Write ``folder/epoch-<n>``, with all units at home, and delete all but the ``keep`` newest; collective.

    Where it cannot be written, as on a full disk, rank 0 warns, what was begun is deleted, the older ones stay, and
    training can go on.

    Returns:
        Whether it was written, on every rank.
    """
    temporary = _FOLDERS.unfinished(folder, progress.epochs)

    def begin() -> None:
        _FOLDERS.begin(folder, progress.epochs)

    def write_own() -> dict[str, Any]:
        host.save(temporary / _shard(host.rank))
        write_state(temporary / _balancer(host.rank), balancer.state_dict())
        return {name: sealed(temporary / name) for name in _own_files(host.rank)}

    def complete() -> None:
        write_values(temporary / _LAYOUT, layout)
        write_values(temporary / _PROGRESS, dataclasses.asdict(progress))
        shared = {name: sealed(temporary / name) for name in (_LAYOUT, _PROGRESS)}
        write_manifest(temporary, {name: told for own in (*written, shared) for name, told in own.items()})
        _FOLDERS.complete_with(folder, progress.epochs)
        sync_names(folder)  # before older ones are deleted

    try:
        on_all_ranks(OSError, begin if host.rank == 0 else do_nothing)
        with balancer.at_home():
            written = of_all_ranks(on_all_ranks(OSError, write_own))
        on_all_ranks(OSError, complete if host.rank == 0 else do_nothing)
    except OSError as error:
        if host.rank == 0:
            _FOLDERS.abandon(folder, progress.epochs, error)
        return False
    if host.rank == 0:
        _FOLDERS.delete_but(folder, keep)
    return True


def load_checkpoint(checkpoint: Path, *, host: Host, balancer: zr.Balancer) -> Progress:
    """Continue from ``checkpoint``, whose layout was checked; collective. Each rank checks the files that it reads.

    Raises:
        ValueError: on every rank, naming the file that is missing or damaged on any of them.
    """
    state_file = checkpoint / _balancer(host.rank)

    def read() -> tuple[Progress, dict[str, Any], dict[str, Tensor]]:
        require_intact(checkpoint, [_PROGRESS, *_own_files(host.rank)])
        return _read_progress(checkpoint), read_state(state_file), host.read(checkpoint / _shard(host.rank))

    def load_balancer() -> None:
        try:
            balancer.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{state_files(state_file)[0]}: {error}") from error

    try:
        progress, state, shard = on_all_ranks(ValueError, read)
        # Before the model, since it can still refuse its state; on no rank, where one could not read its own.
        on_all_ranks(ValueError, load_balancer)
    except ValueError as error:
        raise ValueError(f"{error}\n{_FOLDERS.way_out(checkpoint)}") from error
    with balancer.at_home():
        host.load(shard)
    return progress


def _read_progress(checkpoint: Path) -> Progress:
    path = checkpoint / _PROGRESS
    values = read_values(path)
    try:
        names = [field.name for field in dataclasses.fields(Progress)]
        known_keys("key", values, names)
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"{missing} are missing")
        progress = Progress(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if progress.epochs != epoch_of(checkpoint):
        raise ValueError(f"{path}: of {progress.epochs} epochs, but the checkpoint is called {checkpoint.name}")
    return progress


def _shard(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _balancer(rank: int) -> str:
    return f"balancer-rank{rank}"


def _own_files(rank: int) -> list[str]:
    return [_shard(rank), *(path.name for path in state_files(Path(_balancer(rank))))]


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))
