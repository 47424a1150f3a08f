"""A run's checkpoints: folders by torch.distributed.checkpoint (DCP), with what is no tensor in ``state.json``.

A folder is written under a temporary name and renamed when it is complete, so a crash never leaves half a checkpoint
that looks newest.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

import zeroresize as zr
from vit_examples.harness.program import agreed
from zeroresize.optim.optimizers import torch_optimizer

logger = logging.getLogger(__name__)

_STATE = "state.json"
_NAME = re.compile(r"(?:(?:epoch|step)-\d+|epoch-\d+-step-\d+)")


def checkpoint_folder(config: Any) -> Path:
    """Where a run keeps its checkpoints, whose configuration has ``output.folder``."""
    return Path(config.output.folder) / "checkpoints"


def done_at(checkpoint: Path) -> dict[str, int]:
    """How many epochs or steps were done when it was written: within an epoch both, as ``{"epoch": 1, "step": 6}``."""
    return {unit: int(number) for unit, number in re.findall(r"([a-z]+)-(\d+)", checkpoint.name)}


def in_words(done: Mapping[str, int]) -> str:
    """Such as "epoch 1, step 6"."""
    return ", ".join(f"{unit} {number}" for unit, number in done.items())


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first."""
    checkpoints = (path for path in folder.glob("*") if _NAME.fullmatch(path.name))
    return sorted(checkpoints, key=lambda path: tuple(done_at(path).values()))


def newest(folder: Path) -> Path | None:
    """The complete checkpoint that is furthest."""
    return next(reversed(complete(folder)), None)


def save_checkpoint(
    config: Any,
    done: Mapping[str, int],
    state: Mapping[str, Any],
    tensors: tuple[Any, Any],
    *,
    process_group: ProcessGroup | None = None,
    balancer: Any = None,
) -> bool:
    """Write what a run is made of, and delete all but the ``config.output.keep`` newest; collective.

    Where it cannot be written, as on a full disk, the first rank warns, older ones stay, and training can go on.

    Args:
        done: epochs or steps, as :func:`done_at` returns them.
        state: what is no tensor, as JSON has it.
        tensors: the model and its optimizer.
        balancer: of tensor parallelism or a pipeline, where there is one.

    Returns:
        Whether it was written, on every rank.
    """
    folder = checkpoint_folder(config)
    final = folder / "-".join(f"{unit}-{number:08}" for unit, number in done.items())
    unfinished = final.with_suffix(".tmp")

    def begin() -> None:
        for left in folder.glob("*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir(parents=True)
        (unfinished / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def finish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        for old in complete(folder)[: -config.output.keep]:
            shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)

    try:
        agreed(begin, process_group, kind=OSError, first_only=True)
        dcp.save(_saved(*tensors, balancer), checkpoint_id=unfinished, process_group=process_group)
        agreed(finish, process_group, kind=OSError, first_only=True)
    except (OSError, CheckpointException) as error:
        _raise_interrupt(error, process_group)
        if dist.get_rank(process_group) == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            kept = newest(folder)
            newest_name = "none" if kept is None else kept.name
            logger.warning(
                "no checkpoint of %s could be written (the newest is %s): %s",
                in_words(done), newest_name, _reason(error),
            )  # fmt: skip
        return False
    return True


def read_state(checkpoint: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Read what of a checkpoint is no tensor, before anything is loaded.

    Args:
        layout: what the tensors of this run depend on, as JSON has it; ``state`` has that of the saved run.
    """
    path = checkpoint / _STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        saved = state["layout"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error!r}\n{_way_out(checkpoint)}") from error
    if saved != layout:
        raise ValueError(
            f"{checkpoint} is of another layout, nothing was loaded.\n  checkpoint: {json.dumps(saved)}\n"
            f"  this run:   {json.dumps(layout)}\nResume with the checkpoint's layout, or choose another --output"
        )
    return state


def load_checkpoint(
    checkpoint: Path,
    tensors: tuple[Any, Any],
    *,
    process_group: ProcessGroup | None = None,
    balancer: Any = None,
) -> None:
    """Fill what this rank holds; collective. The optimizer's settings stay those of this run."""
    groups = torch_optimizer(tensors[1]).param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    reader = zr.CheckpointReader(checkpoint)

    def read_index() -> None:
        try:
            reader.read_metadata()
        except (OSError, ValueError) as error:
            raise ValueError(f"{checkpoint}: cannot be loaded: {error}\n{_way_out(checkpoint)}") from error

    agreed(read_index, process_group)  # dcp.load would log an error of it with tracebacks
    try:
        dcp.load(_saved(*tensors, balancer), storage_reader=reader, process_group=process_group)
    except CheckpointException as error:
        _raise_interrupt(error, process_group)
        raise ValueError(f"{checkpoint}: cannot be loaded: {_reason(error)}\n{_way_out(checkpoint)}") from error
    for group, setting in zip(torch_optimizer(tensors[1]).param_groups, settings, strict=True):
        group.update(setting)


def _saved(model: Any, optimizer: Any, balancer: Any) -> dict[str, Any]:
    return {**zr.sharded_state_dict(model, optimizer), **({} if balancer is None else {"balancer": balancer})}


def _way_out(checkpoint: Path) -> str:
    return f"Delete {checkpoint}, and --resume goes on from what is left"


def _raise_interrupt(error: BaseException, process_group: ProcessGroup | None) -> None:
    """Raise KeyboardInterrupt where an interrupt of this rank is what torch takes for a failure of the checkpoint."""
    if isinstance(error, CheckpointException):
        failure = error.failures.get(dist.get_rank(process_group), (None,))[0]
        if isinstance(failure, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def _reason(error: BaseException) -> str:
    """What an error says, without torch's tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in error.failures.items())
