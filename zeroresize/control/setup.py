"""What a balancer is given, checked, and its layers made ready."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import as_process_group, group_rank, group_size
from zeroresize.comm.groups import let_others_fail
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES, MOVABLE_MODES, PRUNING_MODES
from zeroresize.control.setup_checks import Layers, check_layers, check_weights
from zeroresize.convert import balanced_layers, convert, group_of
from zeroresize.integrations.known_faults import warn_of_known_faults
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segments import all_segments
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.segments.search_segments import first_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """Holds what a user gave to a balancer, once it is checked as far as that needs no other rank.

    Attributes:
        model: holds the layers.
        layers: maps names to balanced layers, in the order of the model.
        optimizer: steps their weights.
        config: says how to balance.
        process_group: is the tensor-parallel group.
        replicas_group: is the data-parallel group that the user gave, if any.
    """

    model: nn.Module
    layers: Layers
    optimizer: Any
    config: BalanceConfig
    process_group: ProcessGroup
    replicas_group: ProcessGroup | None

    @property
    def rank(self) -> int:
        """The rank of this process within the tensor-parallel group."""
        return group_rank(self.process_group)

    @property
    def num_ranks(self) -> int:
        """The size of the tensor-parallel group."""
        return group_size(self.process_group)

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        return next(iter(self.layers.values())).local_weight.device

    @property
    def may_lend(self) -> bool:
        """Whether ranks may compute for others, by the mode and by all layers."""
        return self.config.mode in MIGRATING_MODES and all(layer.may_lend for layer in self.layers.values())

    @property
    def are_divided(self) -> bool:
        """Whether units are away from home, or will be as soon as ``config.shares`` divide them."""
        segments, shares = all_segments(self.layers), self.config.shares
        is_uneven = shares == "auto" if isinstance(shares, str) else len(set(shares)) > 1
        is_uneven = is_uneven or self.config.memory_limits is not None
        will_be = is_uneven and not any(segment.has_given_shares for segment in segments)
        return will_be or any(len(set(segment.shares)) > 1 or not segment.owned.is_even for segment in segments)

    @property
    def may_be_away(self) -> bool:
        """Whether units may be away from home at any time."""
        return self.config.mode in MOVABLE_MODES or self.are_divided


def checked_setup(
    model: nn.Module,
    optimizer: Any,
    config: BalanceConfig,
    process_group: ProcessGroup | DeviceMesh | None,
    data_parallel_group: ProcessGroup | DeviceMesh | None,
) -> Setup:
    """Convert the model if it was not converted, and check all that needs no other rank.

    Raises:
        ValueError: as :class:`~zeroresize.balancer.Balancer` tells.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, found {type(model).__name__}: call Balancer(model, optimizer)"
        )
    if not isinstance(config, BalanceConfig):
        raise ValueError(
            f"config must be a BalanceConfig, found {type(config).__name__}: use BalanceConfig(...), "
            "BalanceConfig.from_dict(...) or BalanceConfig.from_yaml(...)"
        )
    process_group = group_of(model, process_group)
    replicas_group: ProcessGroup | None = as_process_group(data_parallel_group)
    config.validate_group_size(group_size(process_group))
    layers = _converted_layers(model, process_group)
    check_weights(layers, config)
    check_layers(model, layers, optimizer, process_group, config)
    if group_rank(process_group) == 0:
        warn_of_known_faults(unwrap(model), optimizer)
    return Setup(model, layers, optimizer, config, process_group, replicas_group)


def tell_other_ranks(model: nn.Module, process_group: ProcessGroup | DeviceMesh | None, error: Exception) -> None:
    """Tell the ranks of the group, which would wait for this one, that its setup has failed; not collective.

    Args:
        model, process_group: as of :func:`checked_setup`.
        error: what it raised.
    """
    with suppress(Exception):  # nothing tells of which group this rank is
        try:
            group = group_of(model, process_group)
        except Exception:  # it may be just this that is wrong
            group = group_of(model)
        if group_size(group) > 1:
            let_others_fail(group, error)


def prepare_layers(setup: Setup) -> None:
    """Take from the layers what a balancer left that was dropped without being closed, and give what this one needs."""
    release_layers(setup)
    config = setup.config
    remembers = config.paper.imputation == "same" and config.mode in PRUNING_MODES
    for layer in setup.layers.values():
        layer.last = LastGradients() if remembers else None
        # From the first backward on, not from the first loan.
        layer.needs_eager_autograd = setup.may_lend


def release_layers(setup: Setup) -> None:
    """Let the layers compute without a balancer."""
    for layer in setup.layers.values():
        layer.plan = layer.loans = layer.last = layer.watch_input = layer.watch_forward = None
        layer.needs_eager_autograd = False


def warn_of_layers_that_stay(setup: Setup) -> None:
    """Log, on rank 0, the layers whose units cannot move although the configuration lets units move."""
    layers = setup.layers
    staying = {
        name: layer.stays_even if layer.segment is None else layer.segment.stays_even
        for name, layer in layers.items()
        if layer.segment is None or layer.segment.stays_even is not None
    }
    if staying and setup.config.may_move and setup.rank == 0:
        names = list(staying)
        logger.warning(
            "neurons or heads of %d of %d layers cannot move to other ranks, so a slow rank keeps them: %s. For %s the "
            "reason is: %s (level DEBUG tells of all)",
            len(staying),
            len(layers),
            first_of(names),
            names[0],
            staying[names[0]],
        )


def _converted_layers(model: nn.Module, process_group: ProcessGroup) -> Layers:
    """Return the layers that may be balanced; convert the model if it, or a layer of it, was not converted yet."""
    layers = balanced_layers(model)
    if not layers or not all(layer.is_searched for layer in layers.values()):
        convert(model, process_group)
        layers = balanced_layers(model)
    return layers
