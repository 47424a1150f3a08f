"""A file that grows by whole pieces, so that it can be read at any time, and whatever becomes of its writer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class GrowingFile:
    """Appends to a file, without a buffer.

    Args:
        path: the file, which is made if it is not there.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._num_bytes = self._file.tell()

    def write(self, piece: bytes) -> None:
        """Append all of ``piece``.

        Raises:
            OSError: if it does not fit; then nothing of it is left in the file.
        """
        rest = memoryview(piece)
        try:
            while rest:  # of a full disk the first part of a piece may still be taken
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(piece)

    def flush(self) -> None:
        """Do nothing: no piece waits to be written."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
