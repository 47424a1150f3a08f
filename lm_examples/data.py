"""Text as bytes: batches that depend on the seed and the step alone, so any number of ranks sees the same ones.

``B`` sequences, ``T`` tokens each.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_examples.sections import DataConfig

#: Other people's packages, which some Pythons keep within their standard library's folder.
_FOREIGN = {"site-packages", "dist-packages"}
#: Ends a file.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Files:
    """Whole files, in an order that depends on their names alone: those to train on, and those that are held out."""

    training: Sequence[bytes]
    held_out: Sequence[bytes]

    @property
    def digest(self) -> str:
        """Differs where the bytes do."""
        parts = (len(text).to_bytes(8, "little") + text for text in [*self.held_out, b"", *self.training])
        return hashlib.blake2b(b"".join(parts)).hexdigest()

    def require(self, data: DataConfig, length: int, key: str) -> None:
        """Raise ValueError, naming the folder, where there are too few bytes for a sequence of a length."""
        for what, texts in (("training", self.training), ("validation", self.held_out)):
            num_bytes = sum(len(text.strip()) for text in texts)
            if num_bytes <= length:
                raise ValueError(
                    f"data.folder={_folder_of(data)}: {num_bytes} bytes for {what} are too few for sequences of {key}: "
                    "give more text, or change data.max_bytes or data.held_out"
                )


class Batches(ABC):
    """Mini-batches by seed and step."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def training(self, step: int) -> Any:
        """The mini-batch of a step."""
        return self._drawn(0, np.random.default_rng([0, self._seed, step]))

    def validation(self, number: int) -> Any:
        """As :meth:`training`, of held-out files; the same whatever the seed."""
        return self._drawn(1, np.random.default_rng([1, 0, number]))

    @abstractmethod
    def _drawn(self, kind: int, random: np.random.Generator) -> Any:
        """Of the texts ``kind``: 0 for training, 1 for those that are held out."""


class TokenBatches(Batches):
    """Inputs [B, T] and the tokens that follow each of them, of runs that begin anywhere.

    Args:
        context: tokens of a sequence.
    """

    def __init__(self, files: Files, *, batch_size: int, context: int, seed: int) -> None:
        super().__init__(seed)
        self._texts = [row_of(b"".join(text + SEPARATOR for text in part)) for part in (files.training, files.held_out)]
        self._batch_size, self._context = batch_size, context

    def _drawn(self, kind: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        data = self._texts[kind]
        starts_B = torch.from_numpy(random.integers(len(data) - self._context, size=self._batch_size))
        tokens = data[starts_B[:, None] + torch.arange(self._context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


def read_files(data: DataConfig) -> Files:
    """The files that a run is trained on.

    Raises:
        ValueError: naming the folder or the file that cannot be read.
    """
    folder = _folder_of(data)
    if not folder.is_dir():
        raise ValueError(f"data.folder={folder}: no such folder")
    texts: list[bytes] = []
    size = 0
    for path in _paths_in(folder):
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            raise ValueError(f"data.folder={folder}: {path} cannot be read: {error.strerror}") from error
        size += len(texts[-1]) + len(SEPARATOR)
        if size >= data.max_bytes:
            break
    num_held_out = math.ceil(data.held_out * len(texts))
    return Files(texts[num_held_out:], texts[:num_held_out])


def row_of(text: bytes) -> Tensor:
    """[bytes] of uint8."""
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def _folder_of(data: DataConfig) -> Path:
    return Path(sysconfig.get_path("stdlib") if data.folder is None else data.folder)


def _paths_in(folder: Path) -> list[Path]:
    """Shuffled by a hash of their names, so that every part is a sample of all."""
    for pattern in ("*.py", "*"):
        names = [path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file()]
        of_the_project = [name for name in names if _FOREIGN.isdisjoint(name.parts)]
        if of_the_project:
            return [folder / name for name in sorted(of_the_project, key=_rank_of)]
    return []


def _rank_of(name: Path) -> bytes:
    return hashlib.blake2b(name.as_posix().encode("utf-8", "surrogateescape"), digest_size=16).digest()
