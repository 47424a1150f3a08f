"""Pipelines of the same layers beside each other, which move their layers alike, and only together.

Data parallelism has them, one for each part of the batch, and tensor parallelism within stages, one for each rank of a
stage: a layer's shards are on the same rank of every stage. ``R`` pipelines of ``S`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Exchange, ranks_with_replicas
from zeroresize.comm.groups import CpuGroup
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.resharding.agreement import MeetReplicas

_NUM_FIGURES = len(fields(LayerProfile))


class PipelineReplicas:
    """Moves the layers of this pipeline together with those beside it, as one rank of them sees it.

    Its constructor is collective over all their ranks, as are its methods. From then on moves of ``pipeline`` are
    agreed on with all of them: where one rank fails, no layer moves in any of them.

    Args:
        pipeline: the one that this rank is in.
        group: the ranks that are this stage, one in each of the pipelines.
        options: what all must have alike besides layers and boundaries.

    Attributes:
        is_first: whether this pipeline is the first of them.

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

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return what each rank gives [R · S], pipeline by pipeline; collective.

        Raises:
            RuntimeError: if a rank does not come, naming it.
        """
        return self._exchange.gather(numbers)

    def gather_most(self, *numbers: float) -> list[float]:
        """Return the largest of each of the numbers that ranks give; collective."""
        return [max(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_slowest(self, profile: PipelineProfile) -> PipelineProfile:
        """Return of every figure the largest in any of the pipelines, as they wait for the slowest of them; collective.

        Args:
            profile: of this pipeline.

        Raises:
            RuntimeError: if a rank does not come, naming it.
        """
        stage, num_stages = self._pipeline.stage, self._pipeline.num_stages
        stage_layers = profile.layers[profile.boundaries[stage] : profile.boundaries[stage + 1]]
        figures = [float(one) for layer in stage_layers for one in astuple(layer)]
        table = self.gather([profile.stage_s[stage], profile.loss_s, *figures])
        largest = [
            [max(column) for column in zip(*table[number::num_stages], strict=True)] for number in range(num_stages)
        ]
        layers = tuple(
            LayerProfile(*of_layer[:2], *map(int, of_layer[2:]))
            for _, _, *of_stage in largest
            for of_layer in (of_stage[at : at + _NUM_FIGURES] for at in range(0, len(of_stage), _NUM_FIGURES))
        )
        stage_s = tuple(seconds for seconds, *_ in largest)
        return PipelineProfile(layers, stage_s, profile.boundaries, max(loss_s for _, loss_s, *_ in largest))
