"""divide_units(): how the units of a model are divided before training, as the user wants it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup

from zeroresize.comm.exchange import Meet
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.resharding.agreement import meet_over
from zeroresize.resharding.units.owned_units import OwnedUnits

logger = logging.getLogger(__name__)


def divide_units(units: OwnedUnits, shares: Sequence[float]) -> None:
    """Divide the units of all segments by ``shares``, on which all ranks have agreed; collective.

    Args:
        units: on which :meth:`~zeroresize.resharding.units.owned_units.OwnedUnits.agree` was called.
        shares: of every rank.

    Raises:
        ValueError: if the optimizer does not let units be divided; on every rank.
        RuntimeError: as :meth:`~zeroresize.resharding.units.owned_units.OwnedUnits.move`.
    """
    if (why := units.why_not_divisible or units.why_not_stepped) is not None:
        raise ValueError(f"shares={list(shares)}: units cannot be divided so: {why}")
    units.move(shares)
    units.forget_moves()
    for segment in units.segments:
        segment.has_given_shares = True
    counts = "; ".join(f"{kind} {' : '.join(map(str, of_ranks))}" for kind, of_ranks in units.num_units.items())
    totals = [sum(of_rank) for of_rank in zip(*units.num_units.values(), strict=True)]
    without = [rank for rank, total in enumerate(totals) if not total]
    logger.info(
        "units are divided by the shares %s: of all layers together the ranks own %s%s",
        list(shares),
        counts,
        f"; ranks {without} own none, and have no work in these layers" if without else "",
    )


def require_segments(shares: Sequence[float] | str, segments: Sequence[object]) -> None:
    """Check that there is something to divide by ``shares``.

    Raises:
        ValueError: if ``segments`` is empty.
    """
    if not segments:
        raise ValueError(
            f"shares={shares!r}: no segment of the model is known to be divisible by units: name one by segments="
        )


def meet_over_layers(process_group: ProcessGroup, layers: Mapping[str, BalancedLinear]) -> Meet:
    """Return a :data:`~zeroresize.comm.exchange.Meet` of the ranks of ``process_group``, from the layers' device."""
    return meet_over(process_group, next(iter(layers.values())).local_weight.device)
