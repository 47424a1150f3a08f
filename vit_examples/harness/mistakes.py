"""Ends a process over a mistake of the user's: with one line, said once however many ranks have made the same."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore

STATUS = 2
#: Seconds for the launcher's store to answer, and for the rank that speaks for others to have spoken.
_PATIENCE = timedelta(seconds=5)


def refuse(error: ValueError) -> NoReturn:
    """Say what is wrong, unless another rank says just that, and end with status 2.

    Raises:
        SystemExit: always.
    """
    rank = os.environ.get("RANK")
    store = _launchers_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"vit_examples/mistakes/{attempt}/{hashlib.sha256(str(error).encode()).hexdigest()}"
    if store is None or not _is_said_by_another(store, key):
        sys.stderr.write(f"error: {error}\n" if rank is None else f"error (rank {rank}): {error}\n")  # whole
        sys.stderr.flush()
        if store is not None:
            with suppress(RuntimeError):
                store.set(f"{key}/said", "")
    raise SystemExit(STATUS) from error


def _is_said_by_another(store: TCPStore, key: str) -> bool:
    """Waits until it is said: as soon as a rank has ended, the launcher stops the others."""
    try:
        if store.add(key, 1) == 1:
            return False
        store.wait([f"{key}/said"], _PATIENCE)
    except RuntimeError:
        return False
    return True


def _launchers_store() -> TCPStore | None:
    """The store that torchrun keeps for its ranks; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    except (ValueError, RuntimeError):
        return None
