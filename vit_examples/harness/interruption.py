"""Ctrl-C: every rank ends with status 130 and without a traceback, and rank 0 says how to go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vit_examples.harness.checkpoint_folders import CheckpointFolders
from vit_examples.harness.run_folder import checkpoint_folder

STATUS = 128 + signal.SIGINT
#: torchrun sends a signal on to ranks that have it from the terminal already: the same again within so many seconds.
_SAME_S = 3.0
#: A rank whose collective failed because another rank was interrupted first has its own signal within so many seconds.
_OWN_SIGNAL_S = 0.3


@contextmanager
def ended_by_interrupt(hint: Callable[[], str]) -> Iterator[None]:
    """A context that an interrupt ends, and the process with it; one that is ignored, as in the background, stays so.

    Args:
        hint: what rank 0 says then.

    Raises:
        SystemExit: with status 130, on an interrupt; other errors pass.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    interrupted_at: list[float] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not interrupted_at or now - interrupted_at[-1] > _SAME_S:
            interrupted_at.append(now)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            yield
        except Exception:
            time.sleep(_OWN_SIGNAL_S)
            raise
    except BaseException:
        if not interrupted_at:
            raise
        before = signal.SIG_IGN  # nothing is to disturb the end of the process
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"interrupted: {hint()}\n")
            sys.stderr.flush()
        raise SystemExit(STATUS) from None
    finally:
        signal.signal(signal.SIGINT, before)


def how_to_go_on(config: Any, unit: str = "epochs") -> str:
    """Say what goes on from where, by what is in the run's output folder now.

    Args:
        unit: in which checkpoints are counted: a key of ``config.training``, "steps" or "epochs".
    """
    singular, total, every = unit.removesuffix("s"), getattr(config.training, unit), config.output.save_every
    folders = CheckpointFolders(singular)
    newest = folders.newest(checkpoint_folder(config))
    if newest is not None:
        done = f"{singular} {folders.number_of(newest)} of {total}"
        return f"the same command with --resume goes on after {done}, from {newest}"
    if not every:
        why = "output.save_every=0 writes none"
    elif every > total:
        why = f"output.save_every={every} writes none in {total} {unit}"
    else:
        why = f"the first comes after {singular} {every}"
    return f"no checkpoint is written yet ({why}); the same command with --resume begins anew"
