"""What tells that something was unpickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Evil:
    """Unpickling it makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)
