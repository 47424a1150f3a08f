"""Rows that several ranks hold: of k and v, which queries' heads share, and of heads whose work ranks divide.

Every rank that owns a unit of a block holds its rows, and computes its own units' part of their gradients. These are
summed in the backward, before they are accumulated, on the first of the ranks that hold the rows; the others
accumulate zeros. So whatever reads gradients, such as a host's clipping, counts each once. The step begins by handing
them to the copies, which therefore stay alike, bit by bit.

A head that several ranks hold is computed by each for some of the tokens: ``T`` of them, cut into equally many slices,
of which a rank's units say which are its. Keys and values are computed for all of a sequence of which it has a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce
from zeroresize.plan.ownership import OwnershipMap, units_by_block

#: Of the slices of a head, the first and the one behind the last that a rank computes.
Span = tuple[int, int]


class Part(NamedTuple):
    """Names a part of the products y [T, N] = x [T, K] wᵀ: of tokens T, and of the features that ranks divide."""

    tokens: slice
    features: slice


@dataclass(eq=False)
class SharedRows:
    """Describes the ``B`` blocks of rows that this rank holds, where several ranks hold ``S`` of all blocks."""

    times: tuple[int, ...]  # [B]: so often each is returned, one after the other, for equally many units each
    rows: int  # of a block, of a row-parallel layer columns
    places: tuple[tuple[int, int], ...]  # of those that others hold, too: which of the B, and which of the S
    first: frozenset[int]  # which of the B no rank before holds
    num_apart: int  # S
    dim: int = 0  # of the layer's weight [N, K]
    slices: int = 1  # of each head
    spans: tuple[tuple[Span, ...], ...] = ()  # [B]: what is computed of each; empty where that is all
    are_sequences_whole: bool = False  # whether any token of a sequence needs all of it
    handed_out: set[str] = field(default_factory=set)  # the parameters whose gradients lie on all ranks, for a step

    @classmethod
    def of(
        cls, owned: OwnershipMap, rank: int, block: int, rows: int, *, dim: int = 0, are_sequences_whole: bool = False
    ) -> SharedRows | None:
        """Return those of blocks of so many neighbouring units; None where none is apart."""
        slices, apart = owned.slices, owned.apart_by(block).tolist()
        if not apart:
            return None
        held, of_each = units_by_block(owned.blocks_of(rank, slices), block // slices)
        first = set(owned.first_blocks_of(rank, block).tolist())
        is_mine = (owned.owners == rank).reshape(-1, block // slices, slices).any(axis=1)[list(held)]
        spans = tuple(_spans(of_block, as_one=are_sequences_whole) for of_block in is_mine)
        return cls(
            tuple(num_units // of_each for num_units in held.values()),
            rows,
            tuple((here, apart.index(number)) for here, number in enumerate(held) if number in apart),
            frozenset(here for here, number in enumerate(held) if number in first),
            len(apart),
            dim,
            slices,
            () if is_mine.all() else spans,
            are_sequences_whole,
        )

    def parts(self, shape: torch.Size) -> list[Part] | None:
        """Return what is computed of the products of x [..., K], or [sequences, tokens, K], of this shape.

        None where that is all. What is computed of all tokens comes first.
        """
        if not self.spans or (self.are_sequences_whole and len(shape) != 3):
            return None
        num_tokens, parts = shape[:-1].numel(), list[Part]()
        # Of sequences, those of which some token is here.
        num_cut, up = (shape[0], self.slices - 1) if self.are_sequences_whole else (num_tokens, 0)
        by_span = sorted((span, here) for here, spans in enumerate(self.spans) for span in spans)
        for (begin, end), blocks in groupby(by_span, lambda each: each[0]):
            edges = num_cut * begin // self.slices, (num_cut * end + up) // self.slices
            tokens = slice(*(num_tokens // max(num_cut, 1) * edge for edge in edges))
            numbers = np.array([here for _, here in blocks])
            for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
                if tokens.start < tokens.stop:
                    parts.append(Part(tokens, slice(int(run[0]) * self.rows, (int(run[-1]) + 1) * self.rows)))
        return sorted(parts, key=lambda part: part.tokens != slice(0, num_tokens))

    def place_of(self, part: Part, axes: str) -> tuple[slice, ...]:
        """Return where a part lies in what has these axes, such as "TK"."""
        where = {"T": part.tokens, "NK"[self.dim]: part.features}
        return tuple(where.get(axis, slice(None)) for axis in axes)

    def computed_of(self, num_sequences: int) -> float:
        """Return which part of the products with all rows that this rank holds it computes of so many sequences."""
        shape = torch.Size((num_sequences, self.slices, 1))
        if (parts := self.parts(shape)) is None:
            return 1.0
        computed = sum((t.stop - t.start) * (features.stop - features.start) for t, features in parts)
        return computed / (shape.numel() * len(self.times) * self.rows)

    def repeated(self, y: Tensor) -> Tensor:
        """Return y [..., B × rows] with every block as often as the units of this rank need it."""
        if max(self.times, default=1) == 1:
            return y
        blocks = y.unflatten(-1, (len(self.times), self.rows)).unbind(-2)
        return torch.cat([block for block, times in zip(blocks, self.times, strict=True) for _ in range(times)], -1)

    def in_graph(self, parameters: tuple[Tensor | None, ...], process_group: ProcessGroup, layer: str) -> Any:
        """Return parameters [B × rows, ...] whose gradients are :meth:`summed` before they are accumulated."""
        return _Summed.apply(self, process_group, layer, *parameters)

    def summed(self, gradients: Sequence[Tensor | None], process_group: ProcessGroup, layer: str) -> Any:
        """Return gradients [B × rows, ...] with the sums of the ranks that hold the same blocks; collective.

        These are on the first of them, and zeros on the others.
        """
        self.handed_out.clear()  # what a step that failed has left there is added to
        copies = [None if gradient is None else gradient.clone() for gradient in gradients]
        blocks = [self._blocks_of(gradient) for gradient in copies if gradient is not None]
        if not blocks:  # they are frozen
            return copies
        messages = [self._message(of_gradient, self.places) for of_gradient in blocks]
        message = torch.cat([each.flatten() for each in messages])
        all_reduce(message, process_group, layer)
        for of_gradient, part in zip(blocks, message.split([each.numel() for each in messages]), strict=True):
            whole = part.view(self.num_apart, *of_gradient.shape[1:])
            for here, place in self.places:
                of_gradient[here] = whole[place] if here in self.first else 0.0
        return copies

    def held_first(self, gradient: Tensor) -> Tensor:
        """Return the blocks [S, rows, ...] of a gradient that this rank holds first; zeros in place of others."""
        return self._message(self._blocks_of(gradient), (each for each in self.places if each[0] in self.first))

    def put(self, gradient: Tensor, whole: Tensor | None) -> None:
        """Put blocks [S, rows, ...] into a gradient where another rank holds them first; zeros for None."""
        blocks = self._blocks_of(gradient)
        for here, place in self.places:
            if here not in self.first:
                blocks[here] = 0.0 if whole is None else whole[place]

    def _message(self, blocks: Tensor, places: Iterable[tuple[int, int]]) -> Tensor:
        """[S, rows, ...] of these blocks; zeros in place of others."""
        message = blocks.new_zeros(self.num_apart, *blocks.shape[1:])
        for here, place in places:
            message[place] = blocks[here]
        return message

    def _blocks_of(self, gradient: Tensor) -> Tensor:
        by_row = gradient if gradient.ndim == 1 else gradient.movedim(self.dim, 0)
        return by_row.unflatten(0, (len(self.times), self.rows))


def _spans(is_mine: NDArray[np.bool_], *, as_one: bool) -> tuple[Span, ...]:
    """Runs of slices, or what they lie within."""
    edges = np.flatnonzero(np.diff(is_mine, prepend=False, append=False)).tolist()
    return ((edges[0], edges[-1]),) if as_one else tuple(zip(edges[::2], edges[1::2], strict=True))


class _Summed(torch.autograd.Function):
    """w, b → w, b; their gradients with the sums of what several ranks hold."""

    @staticmethod
    def forward(ctx, rows, process_group, layer, *parameters):
        ctx.rows, ctx.where = rows, (process_group, layer)
        ctx.set_materialize_grads(False)
        return tuple(None if each is None else each.detach() for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, None, *ctx.rows.summed(gradients, *ctx.where)
