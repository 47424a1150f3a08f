"""Layers that take known seconds, by the tokens and units that a rank has of them, on a rank that may be slow.

Real blocks compute too little for four ranks on two cores to show who is slow. So each block counts its seconds beside
what it computes. ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers.strategies import VOCABULARY, WIDTH, Embedding, Output
from zeroresize.layers.segment import Segment
from zeroresize.plan.layout import TensorSpec
from zeroresize.policy.strategy.costs.cost_model import CostModel, LayerCost, LayerCostTable
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.strategy.packed import Packed

UNITS = 12
#: Of the products by which a rank without a part looks how fast it is.
_PROBE_S = 0.002


class Pace:
    """How fast this rank is; the copies of a layer share it.

    Args:
        token_s: seconds of a token in an undivided block, forward and backward.

    Attributes:
        chi: how many times its normal time all that this rank computes takes.
        taken_s: seconds that were taken so far.
    """

    def __init__(self, token_s: float) -> None:
        self.token_s, self.chi, self.taken_s = token_s, 1.0, 0.0

    def __deepcopy__(self, memo: object) -> Pace:
        return self

    def take(self, seconds: float) -> None:
        """Take what a rank that is not slow does in so many seconds."""
        self.taken_s += self.chi * seconds

    def probe(self) -> float:
        """Return the seconds that a few products take."""
        return self.chi * _PROBE_S


class _Take(torch.autograd.Function):
    """The identity; half of a block's seconds pass in forward, half in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, pace: Pace) -> Tensor:
        ctx.pace, ctx.seconds = pace, 0.0 if h.is_meta else pace.token_s / 2 * len(h) * h.shape[1] / UNITS
        pace.take(ctx.seconds)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.pace.take(ctx.seconds)
        return gradients[0].clone(), None


class PacedBlock(nn.Module):
    """Neurons that a group of ranks divides; takes its seconds by [T, units] of what it computes here."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, UNITS, dtype=torch.float64)
        self.down = nn.Linear(UNITS, WIDTH, dtype=torch.float64)
        self._pace = pace

    def segments(self) -> list[Segment]:
        return [Segment(["up"], "down")]

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        return x + self.down(_Take.apply(torch.tanh(self.up(x)), self._pace))


def paced_layers(num_blocks: int, pace: Pace) -> list[nn.Module]:
    """Return the same layers on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Embedding(torch.float64), *(PacedBlock(pace) for _ in range(num_blocks)), Output(torch.float64)]


def paced_cost_model(tensors: Iterable[TensorSpec], num_blocks: int, token_s: float, num_ranks: int) -> CostModel:
    """Return the costs of these layers on ranks of one node."""
    costs = {
        "block": {tp: LayerCost(0.0, token_s / tp, 0.0, 8.0) for tp in (1, 2, 4)},
        "whole": dict.fromkeys((1, 2, 4), LayerCost(0.0, 0.0, 0.0, 8.0)),
    }
    table = LayerCostTable(("whole", *("block",) * num_blocks, "whole"), costs, 8.0)
    return CostModel(table, tuple(tensors), (0,) * num_ranks, LinkSpeeds(1e9, 1e9))


def sequences_of(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Return rows [length + 1] of tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length + 1,), generator=generator) for length in lengths]
