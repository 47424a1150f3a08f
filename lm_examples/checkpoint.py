"""Checkpoints of a run, by torch.distributed.checkpoint: written on some stages, read on any number.

A folder is written under a temporary name and renamed when complete, so a crash never leaves half a checkpoint that
looks newest. Tensors have the names of the undivided model (``model/layers.7.up.weight``,
``optimizer/layers.7.up.weight/exp_avg``), and every stage reads those of its own layers. ``state.json`` holds what is
no tensor, ``manifest.json`` what every file is like. torch's own index, ``.metadata``, is a pickle: load checkpoints of
your own only.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vit_examples.all_ranks import do_nothing, on_all_ranks
from vit_examples.checkpoint_folders import CheckpointFolders
from vit_examples.manifest import require_all_intact, sealed, sync_names, write_manifest
from vit_examples.plain_files import read_state, state_files, write_state
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import at_least, known_keys

logger = logging.getLogger(__name__)

_STATE = "state"
_FOLDERS = CheckpointFolders("step")
_LAYER = re.compile(r"(?:model|optimizer)/layers\.(\d+)\.")


@dataclass(frozen=True)
class SavedState:
    """What of a run is no tensor of its layers.

    Attributes:
        step: how many are done.
        layout: what the tensors depend on.
        chosen: ``pipeline.boundaries`` of the run that wrote it.
        boundaries: in force.
        balancer: None where there was none.

    Raises:
        ValueError: for a value of another kind.
    """

    step: int
    layout: dict[str, Any]
    chosen: Any
    boundaries: tuple[int, ...]
    balancer: dict[str, Any] | None
    case: dict[str, Any]

    def __post_init__(self) -> None:
        at_least("step", self.step, 1)
        for key in ("layout", "case"):
            if not isinstance(getattr(self, key), dict):
                raise ValueError(f"{key} is no mapping")
        if self.balancer is not None and not isinstance(self.balancer, dict):
            raise ValueError("balancer is no mapping")
        if not isinstance(self.boundaries, list | tuple):
            raise ValueError("boundaries are no list")
        object.__setattr__(self, "boundaries", tuple(self.boundaries))


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step under ``folder``."""
    return _FOLDERS.newest(folder)


def step_of(checkpoint: Path) -> int:
    """How many steps had been trained when it was written."""
    return _FOLDERS.number_of(checkpoint)


def read_saved_state(checkpoint: Path, layout: dict[str, Any]) -> SavedState:
    """What is no tensor of a checkpoint, of which every file is checked.

    Raises:
        ValueError: naming the file that is missing or damaged, or both layouts if they differ.
    """
    try:
        require_all_intact(checkpoint)
        values = read_state(checkpoint / _STATE)
        try:
            saved = SavedState(**known_keys("key", values, list(SavedState.__dataclass_fields__)))
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
    folder: Path, state: SavedState, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, keep: int
) -> bool:
    """Write ``folder/step-<n>`` and delete all but the ``keep`` newest; collective.

    Where it cannot be written, as on a full disk, stage 0 warns, what was begun is deleted, the older ones stay, and
    training can go on.

    Returns:
        Whether it was written, on every rank.
    """
    final = folder / f"step-{state.step:08d}"
    temporary = final.with_suffix(".tmp")
    is_first, group = pipeline.stage == 0, pipeline.process_group

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def complete() -> None:
        write_state(temporary / _STATE, asdict(state))
        write_manifest(temporary, {path.name: sealed(path) for path in temporary.iterdir()})
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_names(folder)  # before older ones are deleted

    try:
        on_all_ranks(OSError, begin if is_first else do_nothing, group)
        dcp.save(
            _contents(pipeline, optimizer),
            storage_writer=FileSystemWriter(temporary, sync_files=False),  # sealed() does that
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
        on_all_ranks(OSError, complete if is_first else do_nothing, group)
    except (OSError, CheckpointException) as error:
        _raise_interrupt(error, pipeline.stage)
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            newest = newest_checkpoint(folder)
            logger.warning(
                "no checkpoint of step %d, training goes on without (the newest is %s): %s",
                state.step,
                newest.name if newest is not None else "none",
                _reason(error),
            )
        return False
    if is_first:
        _FOLDERS.delete_but(folder, keep)
    return True


def load_layers(checkpoint: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Fill the present layers and their optimizer state; collective.

    Raises:
        ValueError: on every rank, naming the checkpoint, if it cannot be read or lacks something.
    """
    reader = FileSystemReader(checkpoint)
    group = pipeline.process_group

    def wanted() -> dict[str, Any]:
        return {
            name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            for name, one in reader.read_metadata().state_dict_metadata.items()
            if _layer_of(name) in pipeline.present
        }

    def install() -> None:
        model = {name.removeprefix("model/"): one for name, one in values.items() if name.startswith("model/")}
        try:
            pipeline.load_state_dict(model)
        except RuntimeError as error:
            raise ValueError(f"{checkpoint}: {error}") from error
        parameters = dict(pipeline.named_parameters())
        for name, one in values.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                parameter, _, key = rest.rpartition("/")
                optimizer.state[parameters[parameter]][key] = one

    try:
        values = on_all_ranks(ValueError, wanted, group)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(values, storage_reader=reader, planner=planner, process_group=group)
        on_all_ranks(ValueError, install, group)
    except (ValueError, CheckpointException) as error:
        _raise_interrupt(error, pipeline.stage)
        raise ValueError(f"{checkpoint}: cannot be loaded: {_reason(error)}\n{_FOLDERS.way_out(checkpoint)}") from error


def _contents(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the present layers, by name: tensors, and what a layer keeps besides them."""
    found = {f"model/{name}": one for name, one in pipeline.state_dict().items()}
    for name, parameter in pipeline.named_parameters():
        if _layer_of(f"model/{name}") in pipeline.present:
            state = optimizer.state.get(parameter, {})
            found |= {f"optimizer/{name}/{key}": torch.as_tensor(one) for key, one in state.items()}
    return found


def _layer_of(name: str) -> int:
    matched = _LAYER.match(name)
    return -1 if matched is None else int(matched[1])


def _raise_interrupt(error: BaseException, rank: int) -> None:
    """An interrupt of this rank, which torch takes for a failure of the checkpoint, ends the run as any other."""
    if isinstance(error, CheckpointException) and isinstance(error.failures.get(rank, (None,))[0], KeyboardInterrupt):
        raise KeyboardInterrupt from error


def _reason(error: BaseException) -> str:
    """Without torch's tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {one!r}" for rank, (one, _) in error.failures.items()) or "no reason is known"
