"""Files of pictures drawn at random."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image


def write_parquet(path: Path, size: int, *, image: str = "img", label: str = "label", side: int = 32) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    cells = []
    for picture in pictures:
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, format="PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    pyarrow.parquet.write_table(pyarrow.table({image: cells, label: [n % 10 for n in range(size)]}), path)
