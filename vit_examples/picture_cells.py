"""Pictures and labels from the cells of a table that anybody may have made: decoded, or refused with their place."""

from __future__ import annotations

import io
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: No decoders but these run: some of Pillow's others start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
MOST_PIXELS = 2**26
_LARGEST_LABEL = 2**31 - 1


@dataclass(frozen=True)
class Cells:
    """One row: where it stands, the cell of its picture, and that of its label.

    Attributes:
        folder: where a picture that is given as a path has to be; relative paths start there.
        may_be_absolute: whether paths may be absolute, as where ``datasets`` has put its downloads.
    """

    where: str
    picture: Any
    label: Any
    folder: Path
    may_be_absolute: bool = False


def decoded(rows: Iterable[Cells], side: int) -> tuple[Tensor, Tensor]:
    """Images [N, 3, S, S] uint8 and labels [N] int64.

    Raises:
        ValueError: naming the row whose picture or label cannot be used.
    """
    images, labels = [], []
    for row in rows:
        labels.append(_label(row))
        images.append(_pixels(row, side))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _label(row: Cells) -> int:
    label = int(row.label) if isinstance(row.label, float) and row.label.is_integer() else row.label
    if not isinstance(label, int) or not 0 <= label <= _LARGEST_LABEL:
        raise ValueError(f"{row.where}: the label is {reprlib.repr(row.label)}, expected a whole number from 0 on")
    return int(label)


def _pixels(row: Cells, side: int) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    content = row.picture
    if isinstance(content, dict):
        content = content.get("bytes")
        if content is None and row.picture.get("path"):
            file = _file_of(row, str(row.picture["path"]))
            try:
                content = file.read_bytes()
            except OSError as error:
                raise ValueError(f"{row.where}: {file} cannot be read: {error.strerror}") from error
    if not isinstance(content, bytes):
        raise ValueError(f"{row.where}: no picture in it, found {reprlib.repr(row.picture)}")
    try:
        picture = Image.open(io.BytesIO(content), formats=FORMATS)  # reads the size, decodes nothing
        num_pixels = picture.width * picture.height
        if num_pixels <= MOST_PIXELS:
            picture = picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise ValueError(f"{row.where}: the picture is too large, {MOST_PIXELS} pixels are allowed: {error}") from error
    except UnidentifiedImageError as error:  # its own text has a memory address, another one on each rank
        raise ValueError(f"{row.where}: the picture is damaged, or none of {', '.join(FORMATS)}") from error
    except Exception as error:  # damaged pictures make Pillow raise errors of many kinds
        raise ValueError(f"{row.where}: the picture is damaged: {error}") from error
    if num_pixels > MOST_PIXELS:
        raise ValueError(f"{row.where}: the picture has {num_pixels} pixels, {MOST_PIXELS} are allowed")
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(picture)


def _file_of(row: Cells, path: str) -> Path:
    """The file that a cell names.

    Raises:
        ValueError: if it is none, or outside the row's folder.
    """
    try:
        file = (row.folder / path).resolve()
        leads_out = not file.is_relative_to(row.folder.resolve())
        is_file = not leads_out and file.is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, links in a circle
        leads_out, is_file = False, False
    if leads_out or ".." in Path(path).parts or (Path(path).is_absolute() and not row.may_be_absolute):
        raise ValueError(f"{row.where}: the picture's path {reprlib.repr(path)} leads out of {row.folder}")
    if not is_file:
        raise ValueError(f"{row.where}: no file {reprlib.repr(path)} in {row.folder}")
    return file
