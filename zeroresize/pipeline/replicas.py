"""Ranks beside those of a pipeline: pipelines of the same layers, and the tensor-parallel group of a stage.

Pipelines beside each other move their layers alike, and only together. Data parallelism has them, one for each part of
the batch, and tensor parallelism within stages, one for each rank of a stage: a layer's shards are on the same rank of
every stage. ``R`` pipelines of ``S`` stages. A stage's tensor-parallel group evens out its ranks by itself before
layers move. Whoever balances such a group is above this package, so it comes in as :class:`StageUnits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Protocol

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Exchange, Meet, ranks_with_replicas
from zeroresize.comm.groups import CpuGroup
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.resharding.agreement import CannotMoveError, MeetReplicas, NotEnoughMemoryError, agreed

#: Of one layer.
NUM_FIGURES = len(fields(LayerProfile))


class PipelineReplicas:
    """Moves the layers of this pipeline together with those beside it, as one rank of them sees it.

    Its constructor is collective over all their ranks, as are its methods. From then on moves of ``pipeline`` are
    agreed on with all of them: where one rank fails, no layer moves in any of them. This pipeline may be the first.

    Args:
        pipeline: the one that this rank is in.
        group: the ranks that are this stage, one in each of the pipelines.
        options: what all must have alike besides layers and boundaries.

    Raises:
        ValueError: on every rank, if the groups of the stages do not make whole pipelines, or these differ in layers,
            boundaries or options.
        RuntimeError: if not all ranks come within the pipeline's time limit.
    """

    def __init__(self, pipeline: Pipeline, group: ProcessGroup, options: str) -> None:
        self._pipeline = pipeline
        exchange = Exchange(CpuGroup(pipeline.process_group, {}))
        try:
            ranks = ranks_with_replicas(pipeline.process_group, group, exchange)
        finally:
            exchange.close()
        alike = {
            "layers, micro-batches or schedule": f"{pipeline.description:.0f}",
            "boundaries": str(list(pipeline.boundaries)),
            "the options of PipelineBalancer": options,
        }
        self._exchange = Exchange(CpuGroup(pipeline.process_group, alike, ranks), counts_forwards=False)
        pipeline.join(MeetReplicas(self._exchange.meet, self._exchange.ranks))
        self.is_first = group_rank(group) == 0

    def gather_most(self, *numbers: float) -> list[float]:
        """Return the largest of each of the numbers that ranks give; collective."""
        return [max(column) for column in zip(*self._exchange.gather(numbers), strict=True)]

    def gather_slowest(self, profile: PipelineProfile) -> PipelineProfile:
        """Return of every figure the largest in any pipeline, as all wait for the slowest of them; collective."""
        stage, num_stages = self._pipeline.stage, self._pipeline.num_stages
        stage_layers = profile.layers[profile.boundaries[stage] : profile.boundaries[stage + 1]]
        figures = [float(one) for layer in stage_layers for one in astuple(layer)]
        table = self._exchange.gather([profile.stage_s[stage], profile.loss_s, *figures])
        largest = [
            [max(column) for column in zip(*table[number::num_stages], strict=True)] for number in range(num_stages)
        ]
        layers = tuple(layer for _, _, *of_stage in largest for layer in layers_of(of_stage))
        stage_s = tuple(seconds for seconds, *_ in largest)
        return PipelineProfile(layers, stage_s, profile.boundaries, max(loss_s for _, loss_s, *_ in largest))


def layers_of(figures: Sequence[float]) -> list[LayerProfile]:
    """Return the layers whose attributes, one layer behind another, are these figures."""
    of_layers = (figures[at : at + NUM_FIGURES] for at in range(0, len(figures), NUM_FIGURES))
    return [LayerProfile(forward_s, backward_s, *map(int, sizes)) for forward_s, backward_s, *sizes in of_layers]


class StageUnits(Protocol):
    """Balances the tensor-parallel group of this rank's stage, by units of the layers that the stage has.

    :class:`zeroresize.StageBalancer` implements it. Its methods but :meth:`watch` are collective over the group; its
    properties are the same on all ranks of the group.
    """

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the group has."""

    @property
    def has_settled(self) -> bool:
        """Return whether what happened before the last :meth:`watch` leads to no more changes within the group."""

    def watch(self) -> None:
        """Settle anew, as something may have changed."""

    def leave(self, boundaries: Sequence[int]) -> None:
        """Bring all units home and let go of the layers, if this stage has others within these boundaries.

        Raises:
            RuntimeError: if the units cannot come home; nothing has been let go of then.
        """

    def attach(self) -> None:
        """Balance the layers that the stage has now."""


def have_settled(units: StageUnits, meet: Meet) -> bool:
    """Return whether the groups of all stages have settled; collective over all ranks that ``meet``."""
    return not any(unsettled for unsettled, *_ in meet(0.0 if units.has_settled else 1.0, 0.0))


def leave_layers(units: StageUnits, boundaries: Sequence[int], meet: Meet) -> None:
    """Let the groups of stages that get other layers let go of them; collective over all ranks that ``meet``.

    Raises:
        CannotMoveError, NotEnoughMemoryError: on every rank, if the units of some cannot come home; all groups
            balance as before then.
        RuntimeError: if a rank does not come.
        Exception: what else letting go raises on this rank; the others then raise a CannotMoveError.
    """
    try:
        agreed(meet, lambda: units.leave(boundaries), what="units of layers that move", moves=True)
    except (CannotMoveError, NotEnoughMemoryError) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, CannotMoveError | NotEnoughMemoryError):
            raise cause from None
        units.attach()
        raise
