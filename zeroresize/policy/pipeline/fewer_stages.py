"""Fewer stages for a model that has become smaller, so that devices can be released.

``L`` layers, ``S`` stages. After DynMo, section 3.4.1, Algorithm 2 (DynPipe's supplement, Algorithm 3, prints
``active <= target`` where ``active > target`` is meant). As printed, a source goes on to further destinations after its
layers have left, and destinations need not be neighbours; here stages stay contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.pipeline.centralized import Run, StageFiller, balanced_partition, joined
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


@dataclass(frozen=True)
class Repacking:
    """Describe which stages stay, and what they have then.

    Attributes:
        stages: that stay, ascending; the others can be released.
        partition: of all layers over them: its stage i is ``stages[i]`` of before.
        transfers: layers that change stages, ascending; stages are numbered as before.
    """

    stages: tuple[int, ...]
    partition: Partition
    transfers: tuple[LayerTransfer, ...]


def repacked(
    load: PipelineLoad, partition: Partition, num_stages: int, *, balances: bool = True, keep: int | None = None
) -> Repacking:
    """Return all layers on ``num_stages`` of the stages, within the memory limits.

    First fit: one stage after the other hands all its layers to the next one if that can hold them, until no more
    stages than wanted are left; nothing else moves. Where that does not suffice, the stages that stay are searched for
    among all choices, and divide the layers anew.

    Args:
        load: of layers and of all stages.
        partition: the one in force.
        num_stages: how many are to be left.
        balances: whether the layers are then divided over the stages that stay by
            :func:`~zeroresize.policy.pipeline.centralized.balanced_partition`, which moves more of them.
        keep: a stage that must stay: first fit hands layers towards it. None for any; then towards the last one.

    Raises:
        ValueError: if so many stages are not possible: the message says how few are.
    """
    load.check_partition(partition)
    if not 1 <= num_stages <= load.num_stages:
        raise ValueError(f"{num_stages} stages cannot be left of {load.num_stages}: wanted are 1 to {load.num_stages}")
    stages, after = _first_fit(load, partition, num_stages, load.num_stages - 1 if keep is None else keep)
    if len(stages) > num_stages or not load.on_stages(stages).fits(after):
        choices = _Choices(load, num_stages, keep)
        if not choices.is_possible(num_stages):
            raise ValueError(_why_not(load, num_stages, keep))
        stages, after = choices.choice(num_stages)
    if balances:
        after = balanced_partition(load.on_stages(stages))
    return Repacking(tuple(stages), after, partition.transfers_to(after, stages))


def can_hold(load: PipelineLoad, num_stages: int, *, keep: int | None = None) -> bool:
    """Whether so many of the stages, ``keep`` among them if it is given, can hold all layers."""
    return _Choices(load, num_stages, keep).is_possible(num_stages)


def _first_fit(load: PipelineLoad, partition: Partition, num_stages: int, keep: int) -> tuple[list[int], Partition]:
    """The stages that stay and the whole stages' layers on them; more than ``num_stages`` where more do not fit."""
    sizes = load.stage_bytes(partition).tolist()
    stages = list(range(load.num_stages))
    rightwards = [(source, source + 1) for source in range(keep)]
    leftwards = [(source, source - 1) for source in range(load.num_stages - 1, keep, -1)]
    for source, destination in rightwards + leftwards:
        if len(stages) > num_stages and sizes[source] + sizes[destination] <= load.memory_limits[destination]:
            sizes[destination] += sizes[source]
            stages.remove(source)
    # What lies between two stages that stay has gone towards `keep`.
    inner = (one + 1 if other <= keep else other for one, other in itertools.pairwise(stages))
    return stages, Partition((0, *(partition.boundaries[stage] for stage in inner), load.num_layers))


class _Choices:
    """All choices of stages that can hold the layers one after the other, O(S · most_stages) at the least.

    Attributes:
        filled: by how many stages come into question, the first ones of all, and by how many of them are taken: how
            many layers these can hold, each at least one, as ranges.
    """

    def __init__(self, load: PipelineLoad, most_stages: int, keep: int | None) -> None:
        self._load, self._filler, self._keep = load, StageFiller(load), keep
        self.filled: list[list[list[tuple[int, int]]]] = [[[(0, 0)], *([] for _ in range(most_stages))]]
        for stage in range(load.num_stages):
            before = self.filled[-1]
            more = ([(run.first + 1, run.end) for run in self._runs(stage, starts)] for starts in before[:-1])
            without = [[] for _ in before] if stage == keep else before
            new = (joined(same + more_layers) for same, more_layers in zip(without[1:], more, strict=True))
            self.filled.append([without[0], *new])

    def is_possible(self, num_stages: int) -> bool:
        """Whether so many of the stages can hold all layers."""
        return _holds(self.filled[-1][num_stages], self._load.num_layers)

    def choice(self, num_stages: int) -> tuple[list[int], Partition]:
        """So many stages, ascending, and the layers that each can hold; only where it is possible."""
        stages, boundaries = list[int](), [self._load.num_layers]
        for stage in reversed(range(self._load.num_stages)):
            wanted = num_stages - len(stages)
            can_do_without = not wanted or _holds(self.filled[stage][wanted], boundaries[-1])
            if can_do_without and stage != self._keep:
                continue
            begins = (run.begin_for(boundaries[-1]) for run in self._runs(stage, self.filled[stage][wanted - 1]))
            boundaries.append(next(begin for begin in begins if begin is not None))
            stages.append(stage)
        return stages[::-1], Partition(tuple(boundaries[::-1]))

    def _runs(self, stage: int, starts: Sequence[tuple[int, int]]) -> list[Run]:
        num_layers = self._load.num_layers
        within = [(first, min(last, num_layers - 1)) for first, last in starts if first < num_layers]
        return self._filler.runs(stage, within, math.inf, num_layers)[0]


def _holds(ranges: Sequence[tuple[int, int]], number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _why_not(load: PipelineLoad, num_stages: int, keep: int | None) -> str:
    choices = _Choices(load, load.num_stages, keep)
    possible = [number for number in range(1, load.num_stages + 1) if choices.is_possible(number)]
    needed = f"{load.byte_sums[-1]:.0f} bytes of layers, up to {load.layer_bytes.max():.0f} each"
    if not possible:
        return f"not even all {load.num_stages} stages can hold {needed}, within their memory limits"
    nearest = f"at least {possible[0]} are needed" if possible[0] > num_stages else f"{possible[-1]} stages can"
    which = f"no {num_stages} of {load.num_stages} stages{'' if keep is None else f' with stage {keep} among them'}"
    return f"{which} can hold {needed}, within their memory limits: {nearest}"
