"""Dropout between the layers of a model, as a balancer's mode and seed need it, until that balancer is closed."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MOVING_MODES
from zeroresize.control.setup import Layers
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.segments import all_segments
from zeroresize.layers.unit_dropout import KeyedDropout, drops
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.segments.search_segments import log_staying_even
from zeroresize.utils.hashing import mixed


class DropoutKeys:
    """Keys the dropout of segments whose units may move, or are away; a segment with other dropout stays even.

    In a mode in which units do not move by themselves dropout stays as the host has it, and so do the units around it,
    unless they are divided unevenly from the start.

    Args:
        model: holds the layers.
        layers: converted layers by name.
        process_group: the tensor-parallel group; replicas of it drop other elements.
        config: its mode and seed count.
        are_divided: whether units are to be divided unevenly from the start.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        process_group: ProcessGroup,
        config: BalanceConfig,
        *,
        are_divided: bool = False,
    ) -> None:
        self._segments = all_segments(layers)
        keyed: list[OwnedSegment] = []
        staying_even: dict[str, str] = {}
        for segment in self._segments:
            segment.stays_even = None
            if config.mode in MOVING_MODES or are_divided or not segment.owned.is_even:
                keyed.append(segment)
            elif drops(segment):
                segment.stays_even = f"in mode {config.mode!r} dropout between its layers stays as it is"
                staying_even |= dict.fromkeys(segment.layers, segment.stays_even)
        log_staying_even(staying_even)
        replica = group_ranks(process_group)[0]
        self._keyed = KeyedDropout(unwrap(model), keyed, seed=mixed(config.seed, replica))

    def close(self) -> None:
        """Put dropout back where all units are at home; units may move by another balancer's mode then."""
        self._keyed.close()
        for segment in self._segments:
            segment.stays_even = None
