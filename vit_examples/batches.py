"""The batches that every tensor-parallel rank sees alike.

``B`` pictures in a batch, ``S`` the side in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_examples.data import Split

_PIXEL_MEAN, _PIXEL_STD = 0.5, 0.25
_CROP_MARGIN = 4


def num_batches(split: Split, batch_size: int) -> int:
    """Whole batches of a split."""
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
