"""Files of a checkpoint's folder, whose names come from a file that anybody may have changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath


def plain_file(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a plain file that lies in ``folder``; the file is looked at, and not opened.

    Raises:
        ValueError: naming folder or file, if ``name`` leads elsewhere (``/dev/zero``, ``../other``, ``inner/file``), or
            what has it is a link, a device, a pipe or a folder.
        FileNotFoundError: if nothing has this name.
    """
    # Of a drive or a stream of Windows, too, should a checkpoint come from or go there.
    if name in ("", ".", "..") or "\0" in name or PurePath(name).name != name or "\\" in name or ":" in name:
        raise ValueError(f"{os.fspath(folder)}: {name!r} is not the name of a file in it, refused")
    path = Path(folder) / name
    require_plain_file(path)
    return path


def require_plain_file(path: Path) -> None:
    """Check that ``path`` is a file of its own: reading a device or a pipe may never end, and a link leads elsewhere.

    Raises:
        ValueError: if ``path`` is none; it names the path.
        FileNotFoundError: if nothing is there.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path}: no plain file (a link, a device, a pipe or a folder), refused")
