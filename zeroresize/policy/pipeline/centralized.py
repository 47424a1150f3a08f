"""Centralised balancing: the partition whose slowest stage is fastest, exactly, over all stages or over fewer.

By time or by parameters, whichever the costs of the load are (DynMo, sections 3.3 and 3.4). ``L`` layers, ``S`` stages.
Dynamic programming over stages: how fast the first layers can be on the first stages, each with at least one layer.
That takes S · L² operations, of all layers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.pipeline.pipeline_load import Floats, NothingFitsError, PipelineLoad


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


def balanced_partition(load: PipelineLoad) -> Partition:
    """Return the partition with the fastest slowest stage, within the memory limits; exact but for rounding.

    Raises:
        NothingFitsError: if no partition fits into the memory limits.
    """
    num_layers = load.num_layers
    slowest_s = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)  # of the first layers on the stages so far
    begins = []
    for stage in range(load.num_stages):
        candidates = np.maximum(slowest_s[:, None], _stage_times(load, stage))
        begins.append(num_layers - candidates[::-1].argmin(axis=0))  # of equals the last: first stages have more
        slowest_s = candidates.min(axis=0)
    if not math.isfinite(slowest_s[num_layers]):
        raise NothingFitsError(_what_is_missing(load))
    boundaries = [num_layers]
    for begin in reversed(begins):
        boundaries.append(int(begin[boundaries[-1]]))
    return Partition(tuple(boundaries[::-1]))


def repacked(load: PipelineLoad, partition: Partition, num_stages: int, *, keep: int | None = None) -> Repacking:
    """Return all layers on ``num_stages`` of the stages: the choice, and the division, whose slowest stage is fastest.

    Of choices that are as fast the first stages stay. DynMo's Algorithm 2 (section 3.4.1) hands on the layers of whole
    stages, first fit, and lets a balancer divide them; here both are one search.

    Args:
        load: of layers and of all stages.
        partition: the one in force.
        num_stages: how many are to be left.
        keep: a stage that must stay; None for any.

    Raises:
        ValueError: if so many stages are not possible: the message says how few are.
    """
    load.check_partition(partition)
    if not 1 <= num_stages <= load.num_stages:
        raise ValueError(f"{num_stages} stages cannot be left of {load.num_stages}: wanted are 1 to {load.num_stages}")
    choices = StageChoices(load, keep)
    if num_stages not in choices.possible:
        raise ValueError(choices.why_not(num_stages))
    stages, after = choices.best(num_stages)
    return Repacking(stages, after, partition.transfers_to(after, stages))


class StageChoices:
    """All choices of stages that can hold the layers one after the other.

    Args:
        load: of layers and of all stages.
        keep: a stage that must be among them; None for any.
        most: so many of them come into question at most; None for any number.

    Attributes:
        possible: how many stages can hold all layers, ascending.
    """

    def __init__(self, load: PipelineLoad, keep: int | None = None, most: int | None = None) -> None:
        self._load, self._keep = load, keep
        num_stages, num_layers, most = load.num_stages, load.num_layers, most or load.num_stages
        #: By how many of the first stages come into question: [how many are taken, layers on them] the slowest one.
        slowest_s = np.full((most + 1, num_layers + 1), np.inf)
        slowest_s[0, 0] = 0.0
        self._slowest_s = [slowest_s]
        for stage in range(num_stages):
            before = self._slowest_s[-1]
            taken = np.maximum(before[:-1, :, None], _stage_times(load, stage)).min(axis=1)
            after = np.full_like(before, np.inf) if stage == keep else before.copy()
            after[1:] = np.minimum(after[1:], taken)
            self._slowest_s.append(after)
        last = self._slowest_s[-1][:, num_layers]
        self.possible = [number for number in range(1, most + 1) if math.isfinite(last[number])]

    def best(self, num_stages: int) -> tuple[tuple[int, ...], Partition]:
        """Return so many stages, ascending, and the layers of each; only where it is possible."""
        stages, boundaries = list[int](), [self._load.num_layers]
        for stage in reversed(range(self._load.num_stages)):
            left = num_stages - len(stages)
            before, wanted_s = self._slowest_s[stage], self._slowest_s[stage + 1][left, boundaries[-1]]
            if stage != self._keep and before[left, boundaries[-1]] <= wanted_s:
                continue
            candidates = np.maximum(before[left - 1], _stage_times(self._load, stage)[:, boundaries[-1]])
            boundaries.append(self._load.num_layers - int(candidates[::-1].argmin()))
            stages.append(stage)
        return tuple(stages[::-1]), Partition(tuple(boundaries[::-1]))

    def why_not(self, num_stages: int) -> str:
        """Return why so many stages cannot hold the layers."""
        load, keep = self._load, self._keep
        needed = f"{load.byte_sums[-1]:.0f} bytes of layers, up to {load.layer_bytes.max():.0f} each"
        if not self.possible:
            return f"not even all {load.num_stages} stages can hold {needed}, within their memory limits"
        least, most = self.possible[0], self.possible[-1]
        nearest = f"at least {least} are needed" if least > num_stages else f"{most} stages can"
        which = f"no {num_stages} of {load.num_stages} stages{'' if keep is None else f' with stage {keep} among them'}"
        return f"{which} can hold {needed}, within their memory limits: {nearest}"


def _stage_times(load: PipelineLoad, stage: int) -> Floats:
    """[L + 1, L + 1] how long a stage takes with the layers from one number up to another; infinite where it cannot."""
    cost, size = (sums[None, :] - sums[:, None] for sums in (load.cost_sums, load.byte_sums))
    number = np.arange(load.num_layers + 1)
    fits = (number[:, None] < number[None, :]) & (size <= load.memory_limits[stage])
    return np.where(fits, cost / load.speeds[stage] + load.waits[stage], np.inf)


def _what_is_missing(load: PipelineLoad) -> str:
    """Where the layers come nearest to fitting, and what they need there."""
    limits = np.minimum(load.memory_limits, load.byte_sums[-1])
    nearest = balanced_partition(PipelineLoad.of(load.layer_bytes, load.num_stages, speeds=limits))
    sizes = load.stage_bytes(nearest)
    stage = int((sizes / limits).argmax())
    return (
        f"no partition of {load.num_layers} layers over {load.num_stages} stages fits into the memory limits: the "
        f"layers need {load.byte_sums[-1]:.0f} bytes in all, the largest {load.layer_bytes.max():.0f}, and the limits "
        f"are {load.memory_limits.sum():.0f} in all, the largest {load.memory_limits.max():.0f}; where they come "
        f"nearest stage {stage} needs {sizes[stage]:.0f} bytes and may hold {load.memory_limits[stage]:.0f}"
    )
