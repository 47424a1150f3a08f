"""What a switchable model is given, its first weights included: checked on each rank, and the same on all of them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.placement.whole_layers import Initialize, SegmentsOf, WholeLayers, WholeTensor
from zeroresize.strategy.switching.rank_agreement import RankAgreement
from zeroresize.strategy.switching.switch import TravelTypes


def agree_on_model(
    layers: Sequence[nn.Module],
    strategies: Sequence[Strategy],
    optimizer_strategy: Strategy | None,
    segments: SegmentsOf | None,
    max_bytes: int,
    types: TravelTypes,
    num_ranks: int,
    agreement: RankAgreement,
) -> tuple[WholeLayers, dict[Strategy, Layout]]:
    """Return the whole layers, and the layout of each strategy, the optimizer's included; collective.

    The arguments are those of :class:`~zeroresize.strategy.model.SwitchableModel`.

    Raises:
        ValueError: for what does not fit.
        RuntimeError: if ranks were given different things, if one fails, or does not come.
    """

    def checked() -> tuple[WholeLayers, dict[Strategy, Layout]]:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} is not allowed: at least 1 is needed")
        whole = WholeLayers(layers, segments, types.weights)
        if types.gradients is not None and not types.gradients.is_floating_point:
            raise ValueError(f"gradient_dtype={types.gradients} is not allowed: a type such as torch.bfloat16 is")
        wanted = dict.fromkeys(
            map(Strategy.of, [*strategies, *([] if optimizer_strategy is None else [optimizer_strategy])])
        )
        if not wanted:
            raise ValueError("strategies=[]: at least one is needed")
        specs = [one.spec for one in whole.tensors]
        return whole, {one: one.layout(specs, num_ranks, whole.num_layers) for one in wanted}

    return agreement.make_alike(
        checked,
        lambda given: [
            [asdict(tensor.spec) for tensor in given[0].tensors],
            [str(tensor.dtype) for tensor in given[0].tensors],
            [strategy.as_dict() for strategy in given[1]],
            optimizer_strategy and Strategy.of(optimizer_strategy).as_dict(),
            max_bytes,
            [str(types.weights), str(types.gradients)],
        ],
        "the layers, the strategies, the optimizer's strategy, max_bytes, compute_dtype or gradient_dtype",
    )


def device_of(layers: Sequence[nn.Module], device: torch.device | str | None) -> torch.device:
    """Return the device of the weights: the one that is given, that of the first tensor, or the CPU for meta."""
    if device is not None:
        return torch.device(device)
    tensors = itertools.chain.from_iterable((*layer.parameters(), *layer.buffers()) for layer in layers)
    return next((one.device for one in tensors if not one.is_meta), torch.device("cpu"))


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
