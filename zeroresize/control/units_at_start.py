"""Which units each rank owns when a balancer is made."""

from __future__ import annotations

import logging

from zeroresize.comm.exchange import Meet
from zeroresize.config.keys import MOVING_MODES
from zeroresize.control.memory_watch import MemoryWatch
from zeroresize.control.setup import Setup
from zeroresize.measure.timed_products import measure_wanted_shares
from zeroresize.plan.ownership import checked_shares
from zeroresize.policy.tensor.memory import GroupMemory
from zeroresize.policy.tensor.rules.ownership import nearest_fitting
from zeroresize.resharding.data_parallel import DataParallelReplicas
from zeroresize.resharding.segments.search_segments import require_same_segments
from zeroresize.resharding.state_dict_guards import guard_optimizer
from zeroresize.resharding.units.owned_units import OwnedUnits, divide_units, require_segments

logger = logging.getLogger(__name__)


def agree_on_units(
    setup: Setup, meet: Meet, replicas: DataParallelReplicas, memory: MemoryWatch | None = None
) -> OwnedUnits:
    """Agree with the other ranks on who owns which units, and divide them; collective.

    They are divided by ``config.shares``, or where these are even by the ranks' memory; not where ``convert`` was told
    how.

    Args:
        setup: what the balancer is given.
        meet: gathers numbers from the ranks of the tensor-parallel group.
        replicas: who else holds the same shards.
        memory: what this rank holds; None without ``config.memory_limits``.

    Raises:
        ValueError: if the ranks do not agree, ``config.shares`` is no division of the units, or they do not fit into
            the ranks' memory.
    """
    units = OwnedUnits(setup.model, setup.layers, setup.optimizer, setup.process_group, meet=meet, replicas=replicas)
    units.agree()
    group_memory = memory.gather(meet) if memory is not None else None
    if setup.config.shares != "even" and not any(segment.has_given_shares for segment in units.segments):
        _divide_by_configuration(units, setup, meet, group_memory)
    if group_memory is not None:
        _divide_by_memory(units, setup, group_memory)
    _log_what_stays(units, setup)
    guard_optimizer(setup.optimizer, units.are_away)  # also once the balancer is closed
    return units


def _divide_by_configuration(units: OwnedUnits, setup: Setup, meet: Meet, memory: GroupMemory | None) -> None:
    """Divide the units by ``config.shares`` before the first step; collective."""
    wanted = setup.config.shares
    require_same_segments(units.segments, wanted, None, setup.process_group, setup.device)
    require_segments(wanted, units.segments)
    shares = measure_wanted_shares(wanted, setup.layers, setup.process_group, meet)
    if wanted == "auto" and memory is not None:
        shares = nearest_fitting(shares, memory.most_shares)
    divide_units(units, checked_shares(shares, setup.num_ranks))


def _divide_by_memory(units: OwnedUnits, setup: Setup, memory: GroupMemory) -> None:
    """Leave every rank room for activations, unless the user has said how to divide the units; collective.

    Raises:
        ValueError: if what a rank would hold does not fit.
    """
    is_given = setup.config.shares != "even" or any(segment.has_given_shares for segment in units.segments)
    may_divide = not is_given and units.why_not_divisible is None
    shares = memory.at_start if may_divide else units.shares
    if (why := memory.why_too_much(shares)) is not None:
        if units.why_not_divisible is not None:
            why += f", and units cannot be divided otherwise: {units.why_not_divisible}"
        raise ValueError(f"memory_limits, units divided by the shares {list(shares)}, activations not counted: {why}")
    if shares != units.shares:
        divide_units(units, shares)


def _log_what_stays(units: OwnedUnits, setup: Setup) -> None:
    """Log why units that were to move cannot: as a warning, once for all ranks, if the optimizer is the reason."""
    if units.why_not_movable is None or setup.config.mode not in MOVING_MODES or not setup.config.moves:
        return
    if units.why_not_divisible is None:
        logger.info("no units change hands between the ranks, neither neurons nor heads: %s", units.why_not_movable)
    elif setup.rank == 0:
        logger.warning(
            "no units change hands, so a slow rank's columns are lent to others instead: %s", units.why_not_movable
        )
