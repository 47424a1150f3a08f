"""Pictures as one uint8 tensor a split, and the batches that every tensor-parallel rank sees alike.

``N`` pictures, ``B`` of them in a batch, ``S`` the side in pixels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_examples.config import DataConfig, ModelConfig
from vit_examples.data_sources import from_datasets, from_parquet, mnist5k

_PIXEL_MEAN, _PIXEL_STD = 0.5, 0.25
_CROP_MARGIN = 4
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Split:
    """Pictures [N, 3, S, S] uint8 and labels [N] int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.numel()


def load_splits(data: DataConfig, model: ModelConfig) -> tuple[Split, Split]:
    """The training and test pictures that ``data`` names.

    Raises:
        ValueError: naming the file or variable that is missing or damaged, or labels that the model lacks.
    """
    source = expand_variables(data.source)
    folder = local_path(source)
    train_size, test_size = data.train_size, data.test_size
    if source == "mnist5k":
        splits = [Split(*arrays) for arrays in mnist5k(model.image_size, train_size, test_size)]
    elif folder is not None and folder.is_dir():
        splits = [Split(*arrays) for arrays in from_parquet(folder, model.image_size, train_size, test_size)]
    elif folder is not None:
        what = "a file" if folder.exists() else "no such folder"
        raise ValueError(
            f"data.source={source!r}: {what}; expected a folder with train*.parquet and test*.parquet, "
            "mnist5k, or the name of a data set on the Hugging Face hub (name, or organisation/name)"
        )
    else:
        splits = [Split(*arrays) for arrays in from_datasets(source, model.image_size, train_size, test_size)]
    for split in splits:
        if int(split.labels.max()) >= model.num_labels or int(split.labels.min()) < 0:
            raise ValueError(
                f"data.source={source!r} has labels {int(split.labels.min())} to {int(split.labels.max())}, but "
                f"model.num_labels={model.num_labels} allows 0 to {model.num_labels - 1}"
            )
    return splits[0], splits[1]


def local_path(source: str) -> Path | None:
    """Where ``source`` points on this machine, whether or not anything is there; None for a name of the hub.

    The hub's names are ``name`` and ``organisation/name``, so all else is a path, and so is what begins in a folder
    that is here.

    Raises:
        ValueError: for what no path can be.
    """
    first, *others = source.split("/")
    try:
        path = Path(source).expanduser()
        looks_local = source.startswith((".", "/", "~")) or source.endswith((".parquet", "/")) or "\\" in source
        is_there = path.exists() or (len(others) == 1 and Path(first).exists())
    except (OSError, RuntimeError) as error:  # a name too long, or no such user
        raise ValueError(f"data.source={source!r}: {error}") from error
    return path if looks_local or is_there or len(others) > 1 else None


def unset_variables(source: str) -> list[str]:
    """Names of the ``${NAME}`` in ``source`` that the environment lacks."""
    return [name for name in _VARIABLE.findall(source) if not os.environ.get(name)]


def expand_variables(source: str) -> str:
    """``source`` with ``${NAME}`` replaced from the environment.

    Raises:
        ValueError: for a variable that is not set.
    """
    for name in unset_variables(source):
        raise ValueError(
            f"data.source={source!r}: the environment variable {name} is not set; "
            f"export {name}=<folder with train*.parquet and test*.parquet>, or choose --data mnist5k"
        )
    return _VARIABLE.sub(lambda match: os.environ[match.group(1)], source)


def num_batches(split: Split, batch_size: int) -> int:
    """Whole batches of a split.

    Raises:
        ValueError: if there is not one.
    """
    if len(split) < batch_size:
        raise ValueError(f"training.batch_size={batch_size} is more than the {len(split)} training pictures")
    return len(split) // batch_size


def training_batches(
    split: Split, batch_size: int, *, seed: int, epoch: int, augment: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of normalised images [B, 3, S, S] float32 and labels [B], in an order fixed by ``seed`` and ``epoch``.

    The last partial batch is dropped. The global random state is neither read nor changed.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(split), generator=generator)
    for index_B in order.split(batch_size)[: num_batches(split, batch_size)]:
        images = split.images[index_B]
        yield normalise(augmented(images, generator) if augment else images), split.labels[index_B]


def test_batches(split: Split, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All of a split in order, the last batch perhaps smaller."""
    for start in range(0, len(split), batch_size):
        yield normalise(split.images[start : start + batch_size]), split.labels[start : start + batch_size]


def normalise(images: Tensor) -> Tensor:
    """uint8 pixels as float32 of about zero mean and unit variance."""
    return images.float().div_(255.0).sub_(_PIXEL_MEAN).div_(_PIXEL_STD)


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture [B, 3, S, S] uint8 shifted by up to 4 pixels and mirrored at random, by ``generator``."""
    num_images, _, side, _ = images.shape
    padded = F.pad(images, (_CROP_MARGIN,) * 4)
    top, left = torch.randint(0, 2 * _CROP_MARGIN + 1, (2, num_images, 1), generator=generator)
    is_mirrored = torch.rand(num_images, 1, generator=generator) < 0.5
    pixels = torch.arange(side)
    rows_BS = top + pixels
    columns_BS = left + torch.where(is_mirrored, pixels.flip(0), pixels)
    picture_B11 = torch.arange(num_images)[:, None, None]
    cropped_BSSC = padded.permute(0, 2, 3, 1)[picture_B11, rows_BS[:, :, None], columns_BS[:, None, :]]
    return cropped_BSSC.permute(0, 3, 1, 2).contiguous()
