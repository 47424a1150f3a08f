"""The ranks that balance together, and which units each of them owns when a balancer is made."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch.distributed as dist

from zeroresize.comm.collectives import group_ranks, world_size
from zeroresize.comm.exchange import Exchange, Meet, ranks_with_replicas
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Whereabouts
from zeroresize.config.keys import MOVING_MODES
from zeroresize.control.memory_watch import MemoryWatch
from zeroresize.control.setup import Setup, warn_of_layers_that_stay
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.segments import all_segments, owned_segments
from zeroresize.layers.unit_dropout import KeyedDropout, drops
from zeroresize.measure.timed_products import measure_wanted_shares
from zeroresize.plan.ownership import checked_shares
from zeroresize.policy.tensor.memory import GroupMemory
from zeroresize.policy.tensor.rules.ownership import nearest_fitting
from zeroresize.resharding.agreement import MeetReplicas
from zeroresize.resharding.data_parallel import DataParallelReplicas, replicas_of, unwrap
from zeroresize.resharding.segments.search_segments import log_staying_even, require_same_segments
from zeroresize.resharding.state_dict_guards import guard_optimizer
from zeroresize.resharding.units.owned_units import OwnedUnits, divide_units, require_segments
from zeroresize.utils.hashing import mixed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Holds what this rank shares with the others; None stands for what a group of one does not need.

    Attributes:
        where: holds this rank's whereabouts, which the other ranks and error texts are told.
        exchange: gathers numbers from the ranks of the group.
        everybody: gathers them from all ranks that move alike: from data-parallel replicas, too, where units may be
            away. Without replicas it is ``exchange``.
        units: holds which units this rank owns.
        memory: counts what this rank holds; None without ``config.memory_limits``.
    """

    where: Whereabouts = field(default_factory=Whereabouts)
    exchange: Exchange | None = None
    everybody: Exchange | None = None
    units: OwnedUnits | None = None
    memory: MemoryWatch | None = None

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of all that decide alike: the one that writes to the log for all."""
        return self.everybody is None or self.everybody.ranks[0] == dist.get_rank()


def join_group(setup: Setup, attached: ExitStack) -> Group:
    """Agree with the other ranks on what is balanced and who owns which units; collective, ValueError otherwise."""
    if setup.num_ranks == 1:
        return Group()
    keys = DropoutKeys(setup)
    attached.callback(keys.close)
    warn_of_layers_that_stay(setup)
    exchange = Exchange(CpuGroup(setup.process_group, _agreement(setup)))
    attached.callback(exchange.close)
    replicas = replicas_of(setup.model, setup.layers, setup.process_group, setup.replicas_group, setup.optimizer)
    memory = MemoryWatch(setup) if setup.config.memory_limits is not None else None
    if memory is not None:
        attached.callback(memory.close)
    units = _agree_on_units(setup, exchange.meet, replicas, memory)
    everybody = exchange
    if world_size() > setup.num_ranks and setup.may_be_away:
        data_parallel_group = replicas.group if units.why_not_movable is None else None
        if ranks := ranks_with_replicas(setup.process_group, data_parallel_group, exchange):
            group = CpuGroup(setup.process_group, _agreement(setup), ranks, exchange.where)
            everybody = Exchange(group, counts_forwards=False)
            attached.callback(everybody.close)
            units.meet = MeetReplicas(everybody.meet, everybody.ranks)
    return Group(exchange.where, exchange, everybody, units, memory)


def _agreement(setup: Setup) -> dict[str, str | list[str]]:
    """Describe all that the ranks must have alike: the configuration, the converted layers, and their segments."""
    agreement: dict[str, str | list[str]] = {key: repr(value) for key, value in setup.config.to_flat_dict().items()}
    agreement["converted layers"] = list(setup.layers)
    agreement["segments whose units may change hands"] = [
        f"{segment.name} ({len(segment.owned.owners)} {segment.kind} by {segment.shares})"
        for segment in owned_segments(setup.layers)
    ]
    return agreement


def _agree_on_units(setup: Setup, meet: Meet, replicas: DataParallelReplicas, memory: MemoryWatch | None) -> OwnedUnits:
    """Agree with the other ranks on who owns which units, and divide them; collective, ValueError where that fails.

    It is done by ``config.shares``, or where these are even by the ranks' memory; not where ``convert`` was told how.
    """
    units = OwnedUnits(setup.model, setup.layers, setup.optimizer, setup.process_group, meet=meet, replicas=replicas)
    units.agree()
    group_memory = memory.gather(meet) if memory is not None else None
    wanted, is_given = setup.config.shares, any(segment.has_given_shares for segment in units.segments)
    if wanted != "even" and not is_given:
        require_same_segments(units.segments, wanted, None, setup.process_group, setup.device)
        require_segments(wanted, units.segments)
        shares = measure_wanted_shares(wanted, setup.layers, setup.process_group, meet)
        if wanted == "auto" and group_memory is not None:
            shares = nearest_fitting(shares, group_memory.most_shares)
        divide_units(units, checked_shares(shares, setup.num_ranks))
    if group_memory is not None:
        _require_room(units, group_memory, may_divide=wanted == "even" and not is_given)
    _log_what_stays(units, setup)
    guard_optimizer(setup.optimizer, units.are_away)  # also once the balancer is closed
    return units


def _require_room(units: OwnedUnits, memory: GroupMemory, *, may_divide: bool) -> None:
    """Leave ranks room for activations, unless the user divided the units; collective, ValueError if none is left."""
    shares = memory.at_start if may_divide and units.why_not_divisible is None else units.shares
    if (why := memory.why_too_much(shares)) is not None:
        if units.why_not_divisible is not None:
            why += f", and units cannot be divided otherwise: {units.why_not_divisible}"
        raise ValueError(f"memory_limits, units divided by the shares {list(shares)}, activations not counted: {why}")
    if shares != units.shares:
        divide_units(units, shares)


def _log_what_stays(units: OwnedUnits, setup: Setup) -> None:
    """Log why units that were to move cannot: as a warning, once for all ranks, if the optimizer is the reason."""
    if units.why_not_movable is None or not (units.segments and setup.config.may_move):
        return
    if units.why_not_divisible is None:
        logger.info("no units change hands between the ranks, neither neurons nor heads: %s", units.why_not_movable)
    elif setup.rank == 0:
        logger.warning("no units change hands, slow ranks lend columns instead: %s", units.why_not_movable)


class DropoutKeys:
    """Keys the dropout of segments whose units may move, or are away; a segment with other dropout stays even.

    In a mode in which units do not move by themselves dropout stays as the host has it, and so do the units around it,
    unless they are divided unevenly from the start. Replicas of the group drop other elements.
    """

    def __init__(self, setup: Setup) -> None:
        config, are_divided = setup.config, setup.are_divided
        self._segments = all_segments(setup.layers)
        keyed: list[OwnedSegment] = []
        staying_even: dict[str, str] = {}
        for segment in self._segments:
            segment.stays_even = None
            if config.mode in MOVING_MODES or are_divided or not segment.owned.is_home:
                keyed.append(segment)
            elif drops(segment):
                segment.stays_even = f"in mode {config.mode!r} dropout between its layers stays as it is"
                staying_even |= dict.fromkeys(segment.layers, segment.stays_even)
        log_staying_even(staying_even)
        replica = group_ranks(setup.process_group)[0]
        self._keyed = KeyedDropout(unwrap(setup.model), keyed, seed=mixed(config.seed, replica))

    def close(self) -> None:
        """Put dropout back where all units are at home; units may move by another balancer's mode then."""
        self._keyed.close()
        for segment in self._segments:
            segment.stays_even = None
