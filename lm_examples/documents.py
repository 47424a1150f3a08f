"""Text of variable length: documents whose lengths are long-tailed, and mini-batches of so many tokens of them.

Tokens are bytes; :data:`END` ends a document that was not cut. A mini-batch depends on the seed and the step alone, so
any number of ranks under any strategies sees the same ones.

``N`` documents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm_examples.data import SEPARATOR, read_files, require_text
from lm_examples.length_distributions import DISTRIBUTIONS, LengthDistribution
from lm_examples.sections import DataConfig
from zeroresize.utils.value_checks import at_least, one_of

#: The token behind the last one of a document.
END = SEPARATOR[0]
#: What is a document, of the files themselves; or the name of a distribution, which then decides how long each is.
PIECES = ("definitions", "files")
#: Mini-batches whose lengths stand for those of all.
_NUM_SAMPLED = 8
#: Where a function, method or class begins, its decorators included.
_DEFINITION = re.compile(rb"^(?: {4})?(?=(?:@|def |class |async def ))", re.MULTILINE)
_DECORATED = re.compile(rb"[ ]*@[^\n]*\n\s*$")


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(DataConfig):
    """The text, and what is a sequence.

    Attributes:
        lengths: ``definitions`` for functions, methods and the beginnings of classes of Python sources, ``files`` for
            whole files, or the name of a distribution (``commoncrawl``, ``github``), by whose lengths the text is cut.
        max_length: tokens of a sequence at most; what is longer is cut there.
    """

    lengths: str = "definitions"
    max_length: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.lengths", self.lengths, [*PIECES, *DISTRIBUTIONS])
        at_least("data.max_length", self.max_length, 1)


class Source(Protocol):
    """What sequences are drawn from."""

    def draw(self, random: np.random.Generator) -> Tensor:
        """A row [length + 1] of uint8."""


class Pieces:
    """Documents as the text has them, each as likely as any other.

    Args:
        documents: [N], none of them empty.
        max_length: tokens at most.
    """

    def __init__(self, documents: Sequence[bytes], max_length: int) -> None:
        self.rows = [_row(one + SEPARATOR)[: max_length + 1] for one in documents]

    def draw(self, random: np.random.Generator) -> Tensor:
        return self.rows[random.integers(len(self.rows))]


class Runs:
    """Runs of a text that begin anywhere, as long as a distribution says.

    Args:
        text: at least ``max_length`` + 1 bytes.
    """

    def __init__(self, text: bytes, distribution: LengthDistribution, max_length: int) -> None:
        self._text, self._distribution, self._max_length = _row(text), distribution, max_length

    def draw(self, random: np.random.Generator) -> Tensor:
        (length,) = self._distribution.draw(1, self._max_length, random)
        begin = int(random.integers(len(self._text) - length))
        return self._text[begin : begin + int(length) + 1]


@dataclass(frozen=True)
class Documents:
    """What a run is trained on.

    Attributes:
        digest: differs where the text does.
    """

    training: Source
    held_out: Source
    digest: str


class MiniBatches:
    """Sequences of documents, drawn by seed and step.

    Args:
        tokens: that a mini-batch has to learn: sequences are added until there are as many, and the last one is cut.
    """

    def __init__(self, documents: Documents, *, tokens: int, seed: int) -> None:
        self._documents, self._tokens, self._seed = documents, tokens, seed

    def training(self, step: int) -> list[Tensor]:
        """Rows [length + 1] of int64, whose lengths come to ``tokens``."""
        return self._drawn(self._documents.training, 0, step)

    def validation(self, number: int) -> list[Tensor]:
        """As :meth:`training`, of held-out files; the same whatever the seed."""
        return self._drawn(self._documents.held_out, 1, number)

    def sample(self) -> list[NDArray[np.int64]]:
        """Lengths of the sequences of each of the first mini-batches."""
        return [lengths_of(self.training(step)) for step in range(1, _NUM_SAMPLED + 1)]

    def _drawn(self, source: Source, kind: int, number: int) -> list[Tensor]:
        random = np.random.default_rng([kind, 0 if kind else self._seed, number])
        rows: list[Tensor] = []
        left = self._tokens
        while left:
            rows.append(source.draw(random)[: left + 1].long())
            left -= len(rows[-1]) - 1
        return rows


def load_documents(data: DocumentsConfig) -> Documents:
    """Read the files that a run is trained on.

    Raises:
        ValueError: naming the folder, if there is too little text in it.
    """
    held_out, training = read_files(data)
    digest = hashlib.blake2b(b"".join(len(one).to_bytes(8, "little") + one for one in [*held_out, *training]))
    sources = [_source_of(data, files, what) for files, what in ((training, "training"), (held_out, "validation"))]
    return Documents(*sources, digest.hexdigest())


def definitions(source: bytes) -> list[bytes]:
    """A Python source, cut before each function, method and class; the parts come to the whole again."""
    cuts = [0]
    for definition in _DEFINITION.finditer(source):
        if definition.start() and not _DECORATED.search(source, cuts[-1], definition.start()):
            cuts.append(definition.start())
    return [source[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(source)], strict=True)]


def lengths_of(rows: Sequence[Tensor]) -> NDArray[np.int64]:
    """[N] tokens that each row has to learn."""
    return np.array([len(one) - 1 for one in rows], dtype=np.int64)


def _source_of(data: DocumentsConfig, files: Sequence[bytes], what: str) -> Source:
    if data.lengths in DISTRIBUTIONS:
        text = SEPARATOR.join(files)
        require_text(data, what, len(text), f"data.max_length={data.max_length}", data.max_length)
        return Runs(text, DISTRIBUTIONS[data.lengths], data.max_length)
    parts = files if data.lengths == "files" else [part for file in files for part in definitions(file)]
    documents = [part.strip(b"\n") for part in parts if part.strip()]
    require_text(data, what, len(documents), "any length", 0)
    return Pieces(documents, data.max_length)


def _row(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
