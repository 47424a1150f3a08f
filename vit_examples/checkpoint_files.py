"""Folders of checkpoints by torch.distributed.checkpoint, whatever is trained.

A folder is written under a temporary name and renamed when complete, so a crash never leaves half a checkpoint that
looks newest. ``state.json`` holds what is no tensor, ``manifest.json`` what every file is like. The index is
``index.json`` in place of torch's pickle ``.metadata``; a folder that has only that is read without running code of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

import zeroresize as zr
from vit_examples.all_ranks import do_nothing, on_all_ranks
from vit_examples.checkpoint_folders import CheckpointFolders
from vit_examples.manifest import require_all_intact, sealed, sync_names, write_manifest
from vit_examples.plain_files import read_state, state_files, write_state
from zeroresize.utils.checkpoint_reader import CheckpointReader
from zeroresize.utils.checkpoint_writer import CheckpointWriter
from zeroresize.utils.value_checks import at_least, known_keys

_STATE = "state"
_FOLDERS = CheckpointFolders("step", 8)


@dataclass(frozen=True)
class SavedState:
    """What of a run is no tensor of its model.

    Attributes:
        step: how many are done.
        layout: what the tensors depend on.

    Raises:
        ValueError: for a value of another kind.
    """

    step: int
    layout: dict[str, Any]

    def __post_init__(self) -> None:
        at_least("step", self.step, 1)
        if not isinstance(self.layout, dict):
            raise ValueError("layout is no mapping")


_State = TypeVar("_State", bound=SavedState)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step under ``folder``."""
    return _FOLDERS.newest(folder)


def read_saved_state(checkpoint: Path, layout: Mapping[str, Any], kind: type[_State]) -> _State:
    """What is no tensor of a checkpoint, of which every file is checked.

    Raises:
        ValueError: naming the file that is missing or damaged, or both layouts if they differ.
    """
    try:
        require_all_intact(checkpoint)
        values = read_state(checkpoint / _STATE)
        try:
            saved = kind(**known_keys("key", values, [one.name for one in fields(kind)]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{state_files(checkpoint / _STATE)[0]}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{error}\n{_FOLDERS.way_out(checkpoint)}") from error
    if saved.layout != layout:
        differing = sorted(key for key in saved.layout.keys() | layout if saved.layout.get(key) != layout.get(key))
        raise ValueError(
            f"{checkpoint} is of another model ({', '.join(differing)} differ), nothing was loaded.\n"
            f"  checkpoint: {json.dumps(saved.layout)}\n  this run:   {json.dumps(layout)}\n"
            "Resume with the checkpoint's, or choose another --output"
        )
    return saved


def save_checkpoint(
    folder: Path, state: SavedState, model: Any, optimizer: torch.optim.Optimizer, *, keep: int
) -> bool:
    """Write ``folder/step-<n>`` and delete all but the ``keep`` newest; collective.

    Where it cannot be written, as on a full disk, the first rank warns, what was begun is deleted, the older ones stay,
    and training can go on.

    Args:
        model: with a process group, such as a pipeline.

    Returns:
        Whether it was written, on every rank.
    """
    process_group = model.process_group
    temporary = _FOLDERS.unfinished(folder, state.step)
    is_first = dist.get_rank(process_group) == 0

    def begin() -> None:
        _FOLDERS.begin(folder, state.step)

    def complete() -> None:
        write_state(temporary / _STATE, asdict(state))
        write_manifest(temporary, {path.name: sealed(path) for path in temporary.iterdir()})
        _FOLDERS.complete_with(folder, state.step)
        sync_names(folder)  # before older ones are deleted

    try:
        on_all_ranks(OSError, begin if is_first else do_nothing, process_group)
        dcp.save(
            zr.sharded_state_dict(model, optimizer),
            storage_writer=CheckpointWriter(temporary, sync_files=False),  # sealed() does that
            process_group=process_group,
        )
        on_all_ranks(OSError, complete if is_first else do_nothing, process_group)
    except (OSError, CheckpointException) as error:
        _raise_interrupt(error, process_group)
        if is_first:
            _FOLDERS.abandon(folder, state.step, _reason(error))
        return False
    if is_first:
        _FOLDERS.delete_but(folder, keep)
    return True


def load_checkpoint(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Fill what this rank holds of a model, and its optimizer's state; collective.

    Raises:
        ValueError: on every rank, naming the checkpoint and the way out, if it cannot be read or lacks something.
    """
    process_group, reader = model.process_group, CheckpointReader(checkpoint)

    def read_index() -> None:
        try:
            reader.read_metadata()
        except OSError as error:
            raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error

    try:
        on_all_ranks(ValueError, read_index, process_group)  # dcp.load would log an error with tracebacks
        dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=reader, process_group=process_group)
    except (ValueError, CheckpointException) as error:
        _raise_interrupt(error, process_group)
        raise ValueError(f"{checkpoint}: cannot be loaded: {_reason(error)}\n{_FOLDERS.way_out(checkpoint)}") from error


def _raise_interrupt(error: BaseException, process_group: ProcessGroup) -> None:
    """An interrupt of this rank, which torch takes for a failure of the checkpoint, ends the run as any other."""
    if isinstance(error, CheckpointException):
        own = error.failures.get(dist.get_rank(process_group), (None,))[0]
        if isinstance(own, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def _reason(error: BaseException) -> str:
    """Without torch's tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {one!r}" for rank, (one, _) in error.failures.items()) or "no reason is known"
