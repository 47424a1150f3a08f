"""Sequences of different lengths one after another, without padding, as a micro-batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroresize.utils.hashing import digest


@dataclass(frozen=True, eq=False)
class Packed:
    """Holds a micro-batch of whole sequences (HotSPa, packing); attention must not look from one into another.

    Every layer is called with it: ``layer(x, packed)``, where x is :attr:`tokens` for the first one.

    Attributes:
        tokens: [T] int64, all sequences one after another.
        targets: [T] int64, what follows each token.
        lengths: of the sequences; their sum is T.
    """

    tokens: Tensor
    targets: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[Tensor]) -> Packed:
        """Pack sequences [length + 1] of int64: all but the last token of each are inputs, all but the first targets.

        Raises:
            ValueError: for a sequence of fewer than two tokens, which has nothing to learn.
        """
        require_sequences(sequences)
        tokens, targets = (torch.cat([row[part] for row in sequences]) for part in (slice(-1), slice(1, None)))
        return cls(tokens, targets, tuple(len(row) - 1 for row in sequences))

    @classmethod
    def hollow(cls, sizes: Mapping[str, int]) -> Packed:
        """Make one of so many "tokens", not initialized, by which shapes of activations are found."""
        tokens = torch.empty(sizes["tokens"], dtype=torch.int64)
        return cls(tokens, tokens, (len(tokens),))

    @property
    def inputs(self) -> Tensor:
        """Return what the first layer is called with: the tokens."""
        return self.tokens

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size that shapes of activations follow, "tokens"."""
        return {"tokens": self.num_tokens}

    def to(self, device: torch.device) -> Packed:
        """Return the same micro-batch with its tensors on a device."""
        return Packed(self.tokens.to(device), self.targets.to(device), self.lengths)

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.tokens)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return where each sequence begins, and T."""
        return (0, *itertools.accumulate(self.lengths))

    @cached_property
    def positions(self) -> Tensor:
        """Return [T] int64, the place of each token within its sequence, on the device of the tokens."""
        device = self.tokens.device
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])


def require_sequences(sequences: Sequence[Tensor]) -> None:
    """Check that a mini-batch is a list of rows [length + 1] of int64, of at least two tokens each."""
    rows: object = sequences
    if not isinstance(rows, Sequence) or not rows:
        given = "empty" if isinstance(rows, Sequence) else f"a {type(rows).__name__}"
        raise ValueError(f"sequences are {given}: a list of rows [length + 1] is needed, without padding")
    wrong = [
        index
        for index, row in enumerate(sequences)
        if not isinstance(row, Tensor) or row.dtype != torch.int64 or row.dim() != 1 or len(row) < 2 or row.is_meta
    ]
    if wrong:
        raise ValueError(f"sequences {wrong} are no tensors [length + 1] of int64, of at least two tokens")


def digest_of(sequences: Sequence[Tensor]) -> str:
    """Return a hash of the sequences' lengths and tokens, the same on ranks that were given the same."""
    lengths = json.dumps([len(sequence) for sequence in sequences])
    return digest(lengths, torch.cat([sequence.cpu() for sequence in sequences]).numpy().tobytes()).hex()
