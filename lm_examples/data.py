"""Text as bytes: batches that depend on the seed and the step alone, so any number of stages sees the same ones.

``B`` sequences, ``T`` tokens each.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm_examples.pipeline_config import RunConfig
from lm_examples.sections import DataConfig

#: Other people's packages, which some Pythons keep within their standard library's folder.
_FOREIGN = {"site-packages", "dist-packages"}
#: Ends a file.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Text:
    """Bytes of whole files, in an order that depends on their names alone.

    Attributes:
        training, held_out: [bytes] uint8.
    """

    training: Tensor
    held_out: Tensor

    @property
    def digest(self) -> str:
        """Differs where the bytes do."""
        return hashlib.blake2b(self.training.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()


class Batches:
    """Sequences of a text, drawn by seed and step.

    Args:
        context: tokens of a sequence.
    """

    def __init__(self, text: Text, *, batch_size: int, context: int, seed: int) -> None:
        self._text, self._batch_size, self._context, self._seed = text, batch_size, context, seed

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] of a step, and those that follow each of them."""
        return self._drawn(self._text.training, 0, step)

    def validation(self, number: int) -> tuple[Tensor, Tensor]:
        """As :meth:`training`, of held-out files; the same whatever the seed."""
        return self._drawn(self._text.held_out, 1, number)

    def _drawn(self, data: Tensor, kind: int, number: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([kind, 0 if kind else self._seed, number])
        starts_B = torch.from_numpy(random.integers(len(data) - self._context, size=self._batch_size))
        tokens = data[starts_B[:, None] + torch.arange(self._context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


def load_text(config: RunConfig) -> Text:
    """The files that a run is trained on.

    Raises:
        ValueError: naming the folder, if there is too little text in it.
    """
    held_out, training = (b"".join(file + SEPARATOR for file in files) for files in read_files(config.data))
    for what, part in (("training", training), ("validation", held_out)):
        require_text(config.data, what, len(part), f"model.context={config.model.context}", config.model.context)
    return Text(*(torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in (training, held_out)))


def require_text(data: DataConfig, what: str, num_bytes: int, key: str, length: int) -> None:
    """Raise ValueError, naming the folder, where there are too few bytes for a sequence of a length."""
    if num_bytes <= length:
        raise ValueError(
            f"data.folder={folder_of(data)}: {num_bytes} bytes for {what} are too few for sequences of {key}: give "
            "more text, or change data.max_bytes or data.held_out"
        )


def folder_of(data: DataConfig) -> Path:
    """Where the text is."""
    return Path(sysconfig.get_path("stdlib") if data.folder is None else data.folder)


def read_files(data: DataConfig) -> tuple[list[bytes], list[bytes]]:
    """Whole files, those that are held out and those to train on, in an order that depends on their names alone.

    Raises:
        ValueError: naming the folder or the file that cannot be read.
    """
    folder = folder_of(data)
    if not folder.is_dir():
        raise ValueError(f"data.folder={folder}: no such folder")
    texts: list[bytes] = []
    size = 0
    for path in _files_of(folder):
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            raise ValueError(f"data.folder={folder}: {path} cannot be read: {error.strerror}") from error
        size += len(texts[-1]) + len(SEPARATOR)
        if size >= data.max_bytes:
            break
    num_held_out = math.ceil(data.held_out * len(texts))
    return texts[:num_held_out], texts[num_held_out:]


def batches_of(config: RunConfig, text: Text) -> Batches:
    """The batches of a run."""
    training = config.training
    return Batches(text, batch_size=training.batch_size, context=config.model.context, seed=training.seed)


def _files_of(folder: Path) -> list[Path]:
    """Shuffled by a hash of their names, so that every part is a sample of all."""
    for pattern in ("*.py", "*"):
        names = [path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file()]
        of_the_project = [name for name in names if _FOREIGN.isdisjoint(name.parts)]
        if of_the_project:
            return [folder / name for name in sorted(of_the_project, key=_rank_of)]
    return []


def _rank_of(name: Path) -> bytes:
    return hashlib.blake2b(name.as_posix().encode("utf-8", "surrogateescape"), digest_size=16).digest()
