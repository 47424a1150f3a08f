"""Rows that several units share, as queries' heads share those of k and v, while a block of such units is apart.

Every rank that owns a unit of a block holds its rows, and computes its own units' part of their gradients. These are
summed in the backward, before they are accumulated, on the first of the ranks that hold the rows; the others
accumulate zeros. So whatever reads gradients, such as a host's clipping, counts each once. The step begins by handing
them to the copies, which therefore stay alike, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce
from zeroresize.plan.ownership import OwnershipMap, units_by_block


@dataclass(eq=False)
class SharedRows:
    """Describes the ``B`` blocks of rows that this rank holds, where several ranks hold ``S`` of all blocks."""

    times: tuple[int, ...]  # [B]: so often each is returned, one after the other, for equally many units each
    rows: int  # of a block
    places: tuple[tuple[int, int], ...]  # of those that others hold, too: which of the B, and which of the S
    first: frozenset[int]  # which of the B no rank before holds
    num_apart: int  # S
    handed_out: set[str] = field(default_factory=set)  # the parameters whose gradients lie on all ranks, for a step

    @classmethod
    def of(cls, owned: OwnershipMap, rank: int, block: int, rows: int) -> SharedRows | None:
        """Return those of blocks of so many neighbouring units; None where none is apart."""
        if not (apart := owned.apart.tolist()):
            return None
        held, of_each = units_by_block(owned.units_of(rank), block)
        first = set(owned.first_blocks_of(rank, block).tolist())
        return cls(
            tuple(num_units // of_each for num_units in held.values()),
            rows,
            tuple((here, apart.index(number)) for here, number in enumerate(held) if number in apart),
            frozenset(here for here, number in enumerate(held) if number in first),
            len(apart),
        )

    def repeated(self, y: Tensor) -> Tensor:
        """Return y [..., B × rows] with every block as often as the units of this rank need it."""
        if max(self.times, default=1) == 1:
            return y
        blocks = y.unflatten(-1, (len(self.times), self.rows)).unbind(-2)
        return torch.cat([block for block, times in zip(blocks, self.times, strict=True) for _ in range(times)], -1)

    def in_graph(self, parameter: Tensor, process_group: ProcessGroup, layer: str) -> Tensor:
        """Return a parameter [B × rows, ...] whose gradient is :meth:`summed` before it is accumulated."""
        summed: Tensor = _Summed.apply(parameter, self, process_group, layer)
        return summed

    def summed(self, gradient: Tensor, process_group: ProcessGroup, layer: str) -> Tensor:
        """Return a gradient [B × rows, ...] with the sums of the ranks that hold the same blocks; collective.

        These are on the first of them, and zeros on the others.
        """
        gradient = gradient.clone()
        self.handed_out.clear()  # what a step that failed has left there is added to
        blocks = self._blocks_of(gradient)
        message = self._message(blocks, self.places)
        all_reduce(message, process_group, layer)
        for here, place in self.places:
            blocks[here] = message[place] if here in self.first else 0.0
        return gradient

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
        return gradient.unflatten(0, (len(self.times), self.rows))


class _Summed(torch.autograd.Function):
    """w → w; dw → dw with the sums of what several ranks hold."""

    @staticmethod
    def forward(ctx, parameter, *how):
        ctx.rows, *ctx.where = how
        return parameter.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.rows.summed(gradient, *ctx.where), None, None, None
