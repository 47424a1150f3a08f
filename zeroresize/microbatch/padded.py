"""Micro-batches of padded rows, with which layers are called: ``layer(x, batch)``.

``B`` rows, ``L`` tokens of a row, ``S`` of a source and ``T`` of a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroresize.policy.microbatches.plan import MicroBatch

#: Targets of padding, which do not count; as ``cross_entropy`` ignores them by default.
IGNORED = -100
#: Tokens of padding.
_PADDING = 0


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Holds rows for a decoder-only model.

    Padding is behind the tokens, so causal attention of a token never sees it. Several samples of a row are seen by
    each other, as where sequences are packed.

    Attributes:
        tokens: [B, L] int64.
        targets: [B, L] int64, what follows each token; :data:`IGNORED` for padding.
    """

    tokens: Tensor
    targets: Tensor

    @classmethod
    def of(cls, samples: Sequence[Tensor] | Mapping[int, Tensor], microbatch: MicroBatch) -> PaddedBatch:
        """Make the rows of a micro-batch from samples [length + 1] of int64, by their numbers in it.

        All but the last token of a sample are inputs, all but the first targets.

        Raises:
            ValueError: for a row that is longer than the micro-batch says, naming it.
        """
        (length,) = microbatch.lengths
        return cls(
            _rows(microbatch, length, _PADDING, {sample: samples[sample][:-1] for sample in microbatch.samples}),
            _rows(microbatch, length, IGNORED, {sample: samples[sample][1:] for sample in microbatch.samples}),
        )

    @staticmethod
    def lengths_of(sample: Tensor) -> tuple[int, ...]:
        """Return what a sample [length + 1] is planned with: its length."""
        return (len(sample) - 1,)

    @classmethod
    def hollow(cls, sizes: Mapping[str, int]) -> PaddedBatch:
        """Make one of so many rows ("size") and tokens ("length"), all of which count."""
        tokens = torch.zeros(sizes["size"], sizes["length"], dtype=torch.int64)
        return cls(tokens, tokens)

    @property
    def inputs(self) -> Tensor:
        """Return what the first layer is called with: the tokens."""
        return self.tokens

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that shapes of activations follow."""
        return {"size": self.tokens.shape[0], "length": self.tokens.shape[1]}

    def to(self, device: torch.device) -> PaddedBatch:
        """Return the same micro-batch with its tensors on a device."""
        return PaddedBatch(self.tokens.to(device), self.targets.to(device))


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Holds rows for an encoder-decoder model.

    Attributes:
        sources: [B, S] int64.
        is_source: [B, S] bool; False for padding, which attention must not see.
        tokens: [B, T] int64, what the decoder is given.
        targets: [B, T] int64, what it should say; :data:`IGNORED` for padding.
    """

    sources: Tensor
    is_source: Tensor
    tokens: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls,
        samples: Sequence[tuple[Tensor, Tensor]] | Mapping[int, tuple[Tensor, Tensor]],
        microbatch: MicroBatch,
        begin: int = 0,
    ) -> PairBatch:
        """Make the rows of a micro-batch from samples ([source], [target]) of int64, by their numbers in it.

        The decoder is given ``begin`` and all but the last token of the target.

        Raises:
            ValueError: for a row that is longer than the micro-batch says, naming it.
        """
        length, target_length = microbatch.lengths
        sources = {sample: samples[sample][0] for sample in microbatch.samples}
        targets = {sample: samples[sample][1] for sample in microbatch.samples}
        begun = {sample: torch.cat([torch.tensor([begin]), target[:-1]]) for sample, target in targets.items()}
        is_token = {sample: torch.ones_like(source) for sample, source in sources.items()}
        return cls(
            _rows(microbatch, length, _PADDING, sources),
            _rows(microbatch, length, 0, is_token).bool(),
            _rows(microbatch, target_length, _PADDING, begun),
            _rows(microbatch, target_length, IGNORED, targets),
        )

    @staticmethod
    def lengths_of(sample: tuple[Tensor, Tensor]) -> tuple[int, ...]:
        """Return what a sample ([source], [target]) is planned with: both lengths."""
        return len(sample[0]), len(sample[1])

    @classmethod
    def hollow(cls, sizes: Mapping[str, int]) -> PairBatch:
        """Make one of so many rows ("size") and tokens ("source" and "target"), all of which count."""
        sources = torch.zeros(sizes["size"], sizes["source"], dtype=torch.int64)
        targets = torch.zeros(sizes["size"], sizes["target"], dtype=torch.int64)
        return cls(sources, torch.ones_like(sources, dtype=torch.bool), targets, targets)

    @property
    def inputs(self) -> Tensor:
        """Return what the first layer is called with: the sources."""
        return self.sources

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that shapes of activations follow."""
        return {"size": self.sources.shape[0], "source": self.sources.shape[1], "target": self.targets.shape[1]}

    def to(self, device: torch.device) -> PairBatch:
        """Return the same micro-batch with its tensors on a device."""
        return PairBatch(*(tensor.to(device) for tensor in (self.sources, self.is_source, self.tokens, self.targets)))


def _rows(microbatch: MicroBatch, length: int, padding: int, parts: Mapping[int, Tensor]) -> Tensor:
    """[B, length] of what samples have, several in a row one behind another."""
    filled = torch.full((microbatch.size, length), padding, dtype=torch.int64)
    for number, row in enumerate(microbatch.rows):
        values = torch.cat([parts[sample] for sample in row])
        if len(values) > length:
            raise ValueError(f"samples {list(row)} have {len(values)} tokens: their row is planned for {length}")
        filled[number, : len(values)] = values
    return filled
