"""Checkpoints of a run by torch.distributed.checkpoint (DCP), whatever is trained.

A folder is written under a temporary name and renamed when complete, so a crash never leaves half a checkpoint that
looks newest. Its files:

- ``__<rank>_0.distcp`` and ``.metadata``: tensors of model and optimizer, read by ``zr.CheckpointReader``, which runs
  no code of a folder;
- ``state.json`` and ``state.safetensors``: what is no tensor of the model, a :class:`SavedState`;
- ``balancer-rank<rank>.json`` and ``.safetensors``: what a rank's ``zr.Balancer`` has learned, where there is one;
- ``manifest.json``: what every file is like.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import zeroresize as zr
from vit_examples.harness.all_ranks import of_all_ranks, on_all_ranks, on_first_rank
from vit_examples.harness.checkpoint_folders import CheckpointFolders, way_out
from vit_examples.harness.manifest import files_in_manifest, require_intact, sealed, write_manifest
from vit_examples.harness.plain_files import read_state, state_files, write_state
from zeroresize.optim.optimizers import torch_optimizer
from zeroresize.utils.checkpoint_reader import CheckpointReader, ReadsItself
from zeroresize.utils.value_checks import known_keys

_STATE, _INDEX = "state", ".metadata"


@dataclass(frozen=True)
class SavedState(ABC):
    """What of a run is no tensor of its model.

    Attributes:
        folders: what the folders of such checkpoints are called.
        layout: what the tensors depend on, as JSON has it.

    Raises:
        ValueError: for a value of another kind.
    """

    folders: ClassVar[CheckpointFolders]
    layout: dict[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.layout, dict):
            raise ValueError("layout is no mapping")

    @property
    @abstractmethod
    def number(self) -> int:
        """How far the run is, in the unit that the folders count."""


_State = TypeVar("_State", bound=SavedState)


def read_saved_state(checkpoint: Path, layout: Mapping[str, Any], kind: type[_State]) -> _State:
    """Read what of a checkpoint is no tensor of the model, before anything is loaded; its files are checked.

    Args:
        layout: that of this run.

    Raises:
        ValueError: naming the file that is missing or damaged, or both layouts if they differ.
    """
    state_file = state_files(checkpoint / _STATE)[0]
    try:
        require_intact(checkpoint, [path.name for path in state_files(checkpoint / _STATE)])
        values = read_state(checkpoint / _STATE)
        try:
            names = [field.name for field in fields(kind)]
            if missing := [name for name in names if name not in values]:
                raise ValueError(f"{missing} are missing")
            saved = kind(**known_keys("key", values, names))
            if saved.number != kind.folders.number_of(checkpoint):
                unit = kind.folders.unit
                raise ValueError(f"of {unit} {saved.number}, but the checkpoint is called {checkpoint.name}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{state_file}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{error}\n{way_out(checkpoint)}") from error
    if saved.layout != layout:
        differing = sorted(key for key in saved.layout.keys() | layout if saved.layout.get(key) != layout.get(key))
        raise ValueError(
            f"{checkpoint} is of another layout ({', '.join(differing)} differ), nothing was loaded.\n"
            f"  checkpoint: {json.dumps(saved.layout)}\n  this run:   {json.dumps(layout)}\n"
            "Resume with the checkpoint's layout, or choose another --output"
        )
    return saved


def save_checkpoint(
    folder: Path,
    state: SavedState,
    model: Any,
    optimizer: Any,
    *,
    keep: int,
    process_group: ProcessGroup | None = None,
    balancer: zr.Balancer | None = None,
) -> bool:
    """Write the checkpoint of ``state.number`` into ``folder`` and delete all but the ``keep`` newest; collective.

    Where it cannot be written, as on a full disk, the first rank warns, what was begun is deleted, the older ones stay,
    and training can go on.

    Args:
        process_group: the ranks that have a part of the model; None for all.
        balancer: each rank's own, where it differs from rank to rank.

    Returns:
        Whether it was written, on every rank.
    """
    folders, rank = state.folders, dist.get_rank(process_group)
    temporary, is_first = folders.unfinished(folder, state.number), rank == 0

    def begin() -> None:
        folders.begin(folder, state.number)

    def write_balancer() -> None:
        if balancer is not None:
            write_state(temporary / _balancer(rank), balancer.state_dict())
        if is_first:
            write_state(temporary / _STATE, asdict(state))

    def seal() -> dict[str, Any]:
        names = {path.name for path in temporary.glob(f"__{rank}_*")} | set(_files_of_balancer(rank, balancer))
        if is_first:
            names |= {_INDEX, *(path.name for path in state_files(Path(_STATE)))}
        return {name: sealed(temporary / name) for name in sorted(names)}

    def complete() -> None:
        write_manifest(temporary, {name: seal for of_rank in seals for name, seal in of_rank.items()})
        folders.complete_with(folder, state.number)

    try:
        on_first_rank(OSError, begin, process_group)
        on_all_ranks(OSError, write_balancer, process_group)
        dcp.save(
            zr.sharded_state_dict(model, optimizer),
            storage_writer=_Writer(temporary, sync_files=False),  # sealed() does that
            process_group=process_group,
        )
        seals = of_all_ranks(on_all_ranks(OSError, seal, process_group), process_group)
        on_first_rank(OSError, complete, process_group)
    except (OSError, CheckpointException) as error:
        _raise_interrupt(error, process_group)
        if is_first:
            folders.abandon(folder, state.number, _reason(error))
        return False
    if is_first:
        folders.delete_but(folder, keep)
    return True


def load_checkpoint(
    checkpoint: Path,
    model: Any,
    optimizer: Any,
    *,
    process_group: ProcessGroup | None = None,
    balancer: zr.Balancer | None = None,
) -> None:
    """Fill what this rank holds of a model, its optimizer's state and its balancer's; collective.

    The ranks check all files first, each a part of them, and what is to be read, so that nothing has changed where one
    does not fit; a pipeline, which decides by what it reads, may be half loaded then. The optimizer's settings, such as
    its weight decay, stay those of this run.

    Raises:
        ValueError: on every rank, naming the checkpoint and the way out, if it cannot be read or lacks something.
    """
    rank, reader = dist.get_rank(process_group), CheckpointReader(checkpoint)

    def read() -> Any:
        shared = sorted(files_in_manifest(checkpoint))[rank :: dist.get_world_size(process_group)]
        require_intact(checkpoint, [*_files_of_balancer(rank, balancer), *shared])
        try:
            reader.read_metadata()
        except OSError as error:
            raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{checkpoint}: cannot be loaded: {error}") from error
        return None if balancer is None else read_state(checkpoint / _balancer(rank))

    def load_balancer() -> None:
        try:
            if balancer is not None:
                balancer.load_state_dict(balancer_state)
        except ValueError as error:
            raise ValueError(f"{state_files(checkpoint / _balancer(rank))[0]}: {error}") from error

    try:
        balancer_state = on_all_ranks(ValueError, read, process_group)  # dcp.load would log an error with tracebacks
        try:
            _require_loadable(reader, model, optimizer, process_group)
            on_all_ranks(ValueError, load_balancer, process_group)
            settings = [{**group, "params": None} for group in torch_optimizer(optimizer).param_groups]
            dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=reader, process_group=process_group)
            for group, kept in zip(torch_optimizer(optimizer).param_groups, settings, strict=True):
                group.update(kept, params=group["params"])
        except CheckpointException as error:
            _raise_interrupt(error, process_group)
            raise ValueError(f"{checkpoint}: cannot be loaded: {_reason(error)}") from error
    except ValueError as error:
        raise ValueError(f"{error}\n{way_out(checkpoint)}") from error


class _Writer(FileSystemWriter):
    """Writes as DCP does, and tells why it could not."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan has of this rank.

        Raises:
            OSError: with the reason and the folder, as on a full disk, which torch tells as an unexpected position.
        """
        try:
            written = super().write_data(plan, planner)
            written.wait()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, os.fspath(self.path)) from error
        return written


class _NothingLoaded(dcp.DefaultLoadPlanner):
    """Plans to read what is asked for, and lets nothing be changed by what is read."""

    def create_local_plan(self) -> LoadPlan:
        for name, entry in self.metadata.state_dict_metadata.items() if self.metadata is not None else ():
            wanted = self.state_dict.get(name)
            properties = getattr(entry, "properties", None)
            if isinstance(wanted, Tensor) and properties is not None and properties.dtype != wanted.dtype:
                raise ValueError(f"{name!r} has dtype {properties.dtype}, {wanted.dtype} is needed")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths, dtype=self.state_dict[read_item.dest_index.fqn].dtype)


def _require_loadable(reader: CheckpointReader, model: Any, optimizer: Any, process_group: ProcessGroup | None) -> None:
    """Read what will be loaded; collective.

    Raises:
        CheckpointException: if something is missing, or cannot be read.
    """
    state = zr.sharded_state_dict(model, optimizer)
    if not any(isinstance(value, ReadsItself) for value in state.values()):
        plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        dcp.load(plain, storage_reader=reader, planner=_NothingLoaded(), process_group=process_group)


def _balancer(rank: int) -> str:
    return f"balancer-rank{rank}"


def _files_of_balancer(rank: int, balancer: zr.Balancer | None) -> list[str]:
    return [] if balancer is None else [path.name for path in state_files(Path(_balancer(rank)))]


def _raise_interrupt(error: BaseException, process_group: ProcessGroup | None) -> None:
    """Raise KeyboardInterrupt where an interrupt of this rank is what torch takes for a failure of the checkpoint."""
    if isinstance(error, CheckpointException):
        failure = error.failures.get(dist.get_rank(process_group), (None,))[0]
        if isinstance(failure, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def _reason(error: BaseException) -> str:
    """Return what an error says, without torch's tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    texts = {rank: str(one) if isinstance(one, OSError | ValueError) else repr(one) for rank, one in failures.items()}
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items()) or "no reason is known"
