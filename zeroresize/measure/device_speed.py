"""How fast the ranks of a group are, by a few products before training."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, world_size
from zeroresize.comm.exchange import Meet
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.plan.ownership import normalised

#: Tokens of a product, the least time that a measurement takes, and its repetitions, of which the fastest counts:
#: whatever disturbs only adds time.
_NUM_TOKENS, _LEAST_S, _REPETITIONS = 512, 0.05, 5
#: Ranks whose speeds differ by less are taken to be equally fast.
_ALIKE = 0.05

logger = logging.getLogger(__name__)


def measure_wanted_shares(
    shares: Sequence[float] | str,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    meet: Meet,
) -> tuple[float, ...]:
    """Return ``shares``, or for ``"auto"`` those that :func:`measured_shares` finds; collective then.

    Raises:
        ValueError: for ``"auto"`` beside ranks outside of ``process_group``.
    """
    if not isinstance(shares, str):
        return tuple(shares)
    if world_size() > group_size(process_group):
        raise ValueError(
            "shares='auto' is not allowed beside data parallelism, where all replicas must be divided alike and "
            "may measure differently: give the shares as numbers"
        )
    measured = measured_shares(layers, meet)
    logger.info(
        "shares='auto': by how fast the ranks multiply they are to own the shares %s",
        [round(share, 2) for share in measured],
    )
    return measured


def measured_shares(layers: Mapping[str, BalancedLinear], meet: Meet) -> tuple[float, ...]:
    """Measure at which shares all ranks take equally long, with a mean of 1; collective, takes about a second.

    Every rank multiplies at the same time, forward and backward, by the weight of its largest layer.

    Args:
        layers: balanced layers by name.
        meet: gives every rank's numbers for this rank's.
    """
    meet(0.0)  # so that all of them multiply at the same time
    weight = max((layer.local_weight for layer in layers.values()), key=Tensor.numel).detach()
    seconds = [own for own, *_ in meet(product_seconds(weight))]
    mean = sum(seconds) / len(seconds)
    if max(seconds) - min(seconds) <= _ALIKE * mean:
        return (1.0,) * len(seconds)
    return normalised([1.0 / own for own in seconds])


@torch.no_grad()
def product_seconds(weight: Tensor, *, least_s: float = _LEAST_S, repetitions: int = _REPETITIONS) -> float:
    """Measure the seconds of the three products of one layer.

    Args:
        weight: [N, K] of the layer.
        least_s: that one measurement takes.
        repetitions: of it, of which the fastest counts.
    """
    x = torch.ones(_NUM_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def products() -> None:
        y = x @ weight.t()
        y @ weight
        y.t() @ x

    products()  # what is set up once
    fastest_s, num_products = float("inf"), 1
    for _ in range(repetitions):
        elapsed_s = 0.0
        while elapsed_s < least_s:
            _synchronize(weight.device)
            began = time.perf_counter()
            for _ in range(num_products):
                products()
            _synchronize(weight.device)
            elapsed_s = time.perf_counter() - began
            if elapsed_s < least_s:
                num_products *= 2
        fastest_s = min(fastest_s, elapsed_s / num_products)
    return fastest_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
