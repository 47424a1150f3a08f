"""What tells that something was unpickled, and checkpoints into which it is put."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_examples.manifest import sealed


class Evil:
    """Unpickling it makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def resealed(checkpoint: Path, name: str) -> None:
    """Let the manifest say that the file ``name`` is as it was written."""
    manifest = checkpoint / "manifest.json"
    told = json.loads(manifest.read_text())
    told["files"][name] = sealed(checkpoint / name)
    manifest.write_text(json.dumps(told))


def change_index(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Let ``change`` do something to what torch.distributed.checkpoint has written as its index."""
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def put_into_planner_data(checkpoint: Path, marker: Path) -> None:
    """Code that runs when the index is unpickled, which leaves all that is read of it as it was."""

    def put(index: Any) -> None:
        index.planner_data = {**(index.planner_data or {}), "evil": Evil(marker)}

    change_index(checkpoint, put)
