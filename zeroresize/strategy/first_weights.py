"""The weights with which a model begins: of each rank its part under the optimizer's strategy."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.placement.whole_layers import Initialize, WholeLayers, WholeTensor
from zeroresize.strategy.switching.rank_agreement import RankAgreement


def take_first_weights(
    layers: WholeLayers,
    strategy: Strategy,
    layout: Layout,
    rank: int,
    device: torch.device,
    initialize: Initialize | None,
    agreement: RankAgreement,
) -> dict[int, Tensor]:
    """Return this rank's part of the weights that the layers were given, by the number of the tensor; collective.

    Raises:
        RuntimeError: if ranks were given different weights.
    """
    parts: dict[int, Tensor] = {}
    digest = 0
    position, stages = strategy.position_of(rank), strategy.partition(layers.num_layers).stages

    def take(number: int, tensor: WholeTensor, whole: Tensor) -> None:
        nonlocal digest
        digest = zlib.crc32(_bytes_of(whole), digest)
        if position is not None and stages[tensor.spec.layer] == position.stage:
            parts[number] = tensor.part_of(whole, layout.units_of(number, rank)).to(device)

    agreement.make_alike(
        lambda: layers.take_weights(device, initialize, take),
        lambda _: digest,
        "the weights that the layers were given: call torch.manual_seed alike on all ranks before they are filled",
    )
    return parts


def _bytes_of(tensor: Tensor) -> memoryview:
    """What is in it, of any type."""
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
