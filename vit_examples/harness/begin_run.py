"""What a run may write into and continues from: its output folder, which is its own while it runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vit_examples.harness.all_ranks import do_nothing, on_all_ranks, require_same
from vit_examples.harness.checkpoint_files import SavedState, read_saved_state
from vit_examples.harness.run_folder import checkpoint_folder, claimed_here, refuse_earlier_run

_State = TypeVar("_State", bound=SavedState)


@dataclass(frozen=True)
class Begun(Generic[_State]):
    """What a run begins from, the same on every rank.

    Attributes:
        held: what keeps other runs out of the output folder; close it when all is written.
        checkpoint, state: those to go on from; None where the run begins anew.
    """

    held: ExitStack
    checkpoint: Path | None
    state: _State | None


def begin_run(
    config: Any,
    settings: dict[str, Any],
    digest: str,
    process_group: ProcessGroup,
    *,
    layout: dict[str, Any],
    kind: type[_State],
    resume: bool,
) -> Begun[_State]:
    """Take the output folder, and find what to go on from; collective.

    Args:
        settings: plain values of ``config``.
        digest: of the text.
        layout: what a checkpoint's tensors depend on, as JSON has it.
        kind: of a checkpoint's state.

    Raises:
        ValueError: on every rank, if the ranks differ, the folder is no such folder, another run has it, it holds an
            earlier run that would be overwritten, or a checkpoint that does not fit.
    """
    require_same("the configuration", json.dumps(settings), process_group)
    require_same("the text to train on", digest, process_group)
    is_first = dist.get_rank(process_group) == 0
    with ExitStack() as held:
        claim = claimed_here(config)
        on_all_ranks(ValueError, (lambda: held.enter_context(claim)) if is_first else do_nothing, process_group)
        newest = on_all_ranks(ValueError, lambda: _to_resume(config, layout, kind, resume=resume), process_group)
        checkpoint, state = (None, None) if newest is None else newest
        require_same("the newest checkpoint", str(checkpoint), process_group)
        return Begun(held.pop_all(), checkpoint, state)


def _to_resume(config: Any, layout: dict[str, Any], kind: type[_State], *, resume: bool) -> tuple[Path, _State] | None:
    """The newest checkpoint of the output folder if asked for, checked; else None."""
    newest = kind.folders.newest(checkpoint_folder(config))
    if not resume:
        refuse_earlier_run(config, newest)
        return None
    return None if newest is None else (newest, read_saved_state(newest, layout, kind))
