"""Checkpoints of a run: whole folders, of one layout, the newest of which a run continues from.

A folder is written under a temporary name and renamed when complete, so a crash never leaves half a checkpoint that
looks newest. ``layout.json`` says which layout its shards fit, ``progress.json`` how far the run was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from vit_examples.config import RunConfig
from vit_examples.host import Host


@dataclass(frozen=True)
class Progress:
    """How far a run is, and what its summary has to tell of the time before a checkpoint.

    Attributes:
        epochs: completed.
        steps: optimizer steps over all of them.
        step_seconds: of every iteration, one sequence a process that trained.
        timed_settings: what they were timed with (:func:`vit_examples.run_folder.timed_settings`).
        commits: of the code that trained, in order.
    """

    epochs: int = 0
    steps: int = 0
    step_seconds: Sequence[Sequence[float]] = ()
    timed_settings: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()


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
    complete = [path for path in folder.glob("epoch-*") if path.is_dir() and path.suffix != ".tmp"]
    return max(complete, key=epoch_of, default=None)


def epoch_of(checkpoint: Path) -> int:
    """How many epochs had been trained when it was written."""
    return int(checkpoint.name.removeprefix("epoch-"))


def require_layout(checkpoint: Path, layout: dict[str, Any]) -> None:
    """Check that ``checkpoint`` fits, before anything of it is loaded.

    Raises:
        ValueError: naming both layouts, or the file that is missing or damaged.
    """
    path = checkpoint / "layout.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected the layout of a checkpoint: {error}") from error
    if saved != layout:
        differing = sorted(key for key in saved.keys() | layout.keys() if saved.get(key) != layout.get(key))
        raise ValueError(
            f"{checkpoint} is of another layout ({', '.join(differing)} differ), nothing was loaded.\n"
            f"  checkpoint: {json.dumps(saved)}\n  this run:   {json.dumps(layout)}\n"
            "Resume with the checkpoint's layout, or choose another --output"
        )


def save_checkpoint(
    folder: Path, progress: Progress, *, host: Host, balancer: zr.Balancer, layout: dict[str, Any], keep: int
) -> None:
    """Write ``folder/epoch-<n>`` and delete all but the ``keep`` newest; collective."""
    final = folder / f"epoch-{progress.epochs:04d}"
    temporary = final.with_suffix(".tmp")
    if host.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    host.save(temporary)
    torch.save(balancer.state_dict(), temporary / f"balancer-rank{host.rank}.pt")
    dist.barrier()
    if host.rank == 0:
        (temporary / "layout.json").write_text(json.dumps(layout, indent=1), encoding="utf-8")
        (temporary / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in sorted(path for path in folder.glob("epoch-*") if path.suffix != ".tmp")[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(checkpoint: Path, *, host: Host, balancer: zr.Balancer) -> Progress:
    """Continue from ``checkpoint``, whose layout was checked; collective."""
    host.load(checkpoint)
    balancer.load_state_dict(torch.load(checkpoint / f"balancer-rank{host.rank}.pt", weights_only=True))
    return Progress(**json.loads((checkpoint / "progress.json").read_text(encoding="utf-8")))
