"""Text of variable length: documents whose lengths are long-tailed, and mini-batches of so many tokens of them.

Tokens are bytes; a :data:`~lm_examples.data.SEPARATOR` ends a document that was not cut. ``N`` documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lm_examples.data import SEPARATOR, Batches, Files, row_of
from lm_examples.length_distributions import DISTRIBUTIONS, LengthDistribution
from lm_examples.sections import DataConfig
from vit_examples.harness.checked_fields import Count

#: Draws a row [length + 1] of uint8.
Source = Callable[[np.random.Generator], Tensor]
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

    lengths: Literal["definitions", "files", "commoncrawl", "github"] = "definitions"
    max_length: Count = 1024


class MiniBatches(Batches):
    """Rows [length + 1] of int64, whose lengths come to ``tokens``: rows are added until there are as many.

    The last row is cut.

    Args:
        sources: of what is trained on, and of what is held out.
    """

    def __init__(self, sources: Sequence[Source], *, tokens: int, seed: int) -> None:
        super().__init__(seed)
        self._sources, self._tokens = sources, tokens

    def sample(self) -> list[NDArray[np.int64]]:
        """Lengths of the sequences of each of the first mini-batches."""
        return [lengths_of(self.training(step)) for step in range(1, _NUM_SAMPLED + 1)]

    def _drawn(self, kind: int, random: np.random.Generator) -> list[Tensor]:
        rows: list[Tensor] = []
        left = self._tokens
        while left:
            rows.append(self._sources[kind](random)[: left + 1].long())
            left -= len(rows[-1]) - 1
        return rows


def sources_of(data: DocumentsConfig, files: Files) -> list[Source]:
    """What is trained on, and what is held out; ValueError, naming the folder, if there is too little text."""
    distribution = DISTRIBUTIONS.get(data.lengths)
    if distribution is not None:
        files.require(data, data.max_length, f"data.max_length={data.max_length}")
        texts = (SEPARATOR.join(part) for part in (files.training, files.held_out))
        return [_runs(row_of(text), distribution, data.max_length) for text in texts]
    files.require(data, 0, "any length")
    parts = (files.training, files.held_out)
    if data.lengths == "definitions":
        parts = tuple([piece for text in part for piece in definitions(text)] for part in parts)
    return [pieces([piece.strip(b"\n") for piece in part if piece.strip()], data.max_length) for part in parts]


def pieces(documents: Sequence[bytes], max_length: int) -> Source:
    """Documents as the text has them, none of them empty, each as likely as any other, cut to so many tokens."""
    rows = [row_of(text + SEPARATOR)[: max_length + 1] for text in documents]
    return lambda random: rows[random.integers(len(rows))]


def _runs(text: Tensor, distribution: LengthDistribution, max_length: int) -> Source:
    """Runs that begin anywhere in a text of more than ``max_length`` bytes, as long as a distribution says."""

    def draw(random: np.random.Generator) -> Tensor:
        (length,) = distribution.draw(1, max_length, random)
        begin = int(random.integers(len(text) - length))
        return text[begin : begin + int(length) + 1]

    return draw


def definitions(source: bytes) -> list[bytes]:
    """A Python source, cut before each function, method and class; the parts come to the whole again."""
    cuts = [0]
    for definition in _DEFINITION.finditer(source):
        if definition.start() and not _DECORATED.search(source, cuts[-1], definition.start()):
            cuts.append(definition.start())
    return [source[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(source)], strict=True)]


def lengths_of(rows: Sequence[Tensor]) -> NDArray[np.int64]:
    """[N] tokens that each row has to learn."""
    return np.array([len(row) - 1 for row in rows], dtype=np.int64)
