"""Pipelines whose layers move between stages: train by torch's schedules, measure each layer, move, train on.

- :class:`Pipeline` is one rank's stage: ``step`` and ``evaluate`` run ``Schedule1F1B`` or ``ScheduleGPipe``.
- :class:`LayerProfiler` measures seconds and bytes of every layer in one iteration, for all ranks.
- :func:`move_layers` gives the stages other layers, between two steps, all or nothing.
- :func:`clip_grad_norm_` clips by the norm of all stages' gradients.

Who should have which layers is decided elsewhere, on the plain numbers of a :class:`PipelineProfile`; stage ``s`` has
the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
"""

from zeroresize.pipeline.gradients import clip_grad_norm_
from zeroresize.pipeline.moving import LayerMoveReport, move_layers
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.profiling import LayerProfile, LayerProfiler, PipelineProfile

__all__ = [
    "LayerMoveReport",
    "LayerProfile",
    "LayerProfiler",
    "Pipeline",
    "PipelineProfile",
    "clip_grad_norm_",
    "move_layers",
]
