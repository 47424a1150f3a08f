"""What rank 1 alone says that balancing may be, by calls or by its file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zeroresize.comm import pausing
from zeroresize.comm.pausing import VARIABLE


class Wishes:
    """Says so on rank 1, and nothing on others."""

    def __init__(self, rank: int, tmp_path: Path, *, by_file: bool) -> None:
        self._is_heard, self._file, self._by_file = rank == 1, tmp_path / "balancing", by_file
        self.says = f"the file of {VARIABLE}" if by_file else "pause()"

    @contextmanager
    def read(self) -> Iterator[None]:
        """Balancers that are made within read this rank's file."""
        with pytest.MonkeyPatch.context() as patched:
            if self._is_heard and self._by_file:
                patched.setenv(VARIABLE, str(self._file))
            patched.setattr(pausing, "READ_EVERY_S", 0.0)
            yield

    def say(self, balancer: Any, state: str) -> None:
        """Say "on", "advice" or "off"."""
        if not self._is_heard:
            return
        if self._by_file:
            self._file.write_text(f"{state} \n")
        elif state == "on":
            balancer.resume()
        else:
            balancer.pause(advice=state == "advice")
