"""What a run may write into and continues from: its output folder, which is its own while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vit_examples.harness.all_ranks import on_all_ranks, on_first_rank, require_same
from vit_examples.harness.checkpoint_files import SavedState, read_saved_state
from vit_examples.harness.config_reader import ConfigReader
from vit_examples.harness.run_folder import (
    changed_settings,
    checkpoint_folder,
    claimed,
    flat_settings,
    refuse_earlier_run,
)

_Config = TypeVar("_Config")
_State = TypeVar("_State", bound=SavedState)


@dataclass(frozen=True)
class Begun(Generic[_State]):
    """What a run begins from, the same on every rank.

    Attributes:
        held: what keeps other runs out of the output folder; close it when all is written.
        saved: the checkpoint to go on from, and what of it is no tensor; None where the run begins anew.
    """

    held: ExitStack
    saved: tuple[Path, _State] | None


def begin_run(
    reader: ConfigReader[_Config],
    config: _Config,
    process_group: ProcessGroup,
    *,
    layout: dict[str, Any],
    kind: type[_State],
    resume: bool,
    digests: Mapping[str, str] | None = None,
) -> Begun[_State]:
    """Take the output folder, and find what to go on from; collective.

    The first rank says so where there is nothing to resume, or settings have changed since.

    Args:
        layout: what a checkpoint's tensors depend on, as JSON has it.
        kind: of a checkpoint's state.
        digests: of what else must be the same on all ranks, by what it is.

    Raises:
        ValueError: on every rank, if the ranks differ, the folder is no such folder, another run has it, it holds an
            earlier run that would be overwritten, or a checkpoint that does not fit.
    """
    settings = flat_settings(reader.to_dict(config))
    for what, value in {"the configuration": json.dumps(settings), **(digests or {})}.items():
        require_same(what, value, process_group)
    with ExitStack() as held:
        on_first_rank(ValueError, lambda: held.enter_context(claimed(config)), process_group)
        saved = on_all_ranks(ValueError, lambda: _to_resume(config, layout, kind, resume=resume), process_group)
        require_same("the newest checkpoint", str(saved and saved[0].name), process_group, is_shown=True)
        if resume and dist.get_rank(process_group) == 0:
            changed = changed_settings(config, settings)
            if saved is None:
                print(f"no checkpoint in {checkpoint_folder(config)}: starting anew", flush=True)
            elif changed:
                print(f"resuming with changed settings: {', '.join(changed)}", flush=True)
        return Begun(held.pop_all(), saved)


def _to_resume(config: Any, layout: dict[str, Any], kind: type[_State], *, resume: bool) -> tuple[Path, _State] | None:
    """Return the newest checkpoint of the output folder if asked for, checked; else None."""
    newest = kind.folders.newest(checkpoint_folder(config))
    if not resume:
        refuse_earlier_run(config, newest)
        return None
    return None if newest is None else (newest, read_saved_state(newest, layout, kind))
