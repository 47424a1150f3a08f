"""Who may write to files."""

from __future__ import annotations

import stat
from pathlib import Path


def writable_by_all(folder: Path) -> list[Path]:
    """Files and folders in ``folder``, and itself, that everybody may write to."""
    return [one for one in (folder, *folder.rglob("*")) if one.stat().st_mode & stat.S_IWOTH]
