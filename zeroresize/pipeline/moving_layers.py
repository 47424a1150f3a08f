"""Layers move from one stage of a pipeline to another between two steps, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.resharding.transaction import MoveReport, Participants, run_transaction


@dataclass(frozen=True, kw_only=True)
class LayerMoveReport(MoveReport):
    """Reports what a move of layers was on this rank: of parameters, buffers, gradients and optimizer state.

    Attributes:
        num_layers: how many changed stages, in the whole pipeline.
    """

    num_layers: int


def move_layers(
    pipeline: Pipeline, boundaries: Sequence[int], *, optimizer: object | None, max_bytes: int = 64 * 2**20
) -> LayerMoveReport:
    """Give the pipeline's stages other layers; collective, between two steps.

    With a layer travel its parameters, buffers, gradients where there are some, all optimizer state, what its modules'
    ``get_extra_state`` returns, and whether parameters require gradients and modules are in training. All arrives bit
    for bit, so layers that move away and back leave everything as it was. Modules, Parameter objects and the
    optimizer's parameter groups stay; see :class:`Pipeline`.

    All or nothing: nobody changes anything before every rank has received all. Until then a rank holds the layers that
    come beside those that go, and messages of at most ``max_bytes``.

    Args:
        boundaries: stage ``s`` then has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
        optimizer: the only one that steps these parameters, given all of ``pipeline.parameters()``; None for none.
        max_bytes: of messages that this rank sends and receives at once; at least 2.

    Raises:
        ValueError: for boundaries that do not fit, layers inside wrappers of data parallelism, a parameter of layers on
            different stages, an optimizer that is a wrapper or ZeRO, or does not step all parameters that want
            gradients, or state that cannot move; the other ranks raise a RuntimeError.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in boundaries or the optimizer's settings, or one dies
            or fails; it names them. After any of these everything is as it was. Only what ``set_extra_state`` of a
            layer raises, and a rank that dies just when the last one has received all, can leave others with layers
            moved.
    """
    begin = time.perf_counter()
    move = run_transaction(lambda: LayerMove(pipeline, boundaries, optimizer, max_bytes), participants_of(pipeline))
    return LayerMoveReport(num_layers=move.num_layers, **move.figures(begin))


def participants_of(pipeline: Pipeline) -> Participants:
    """Return the ranks of a pipeline as participants, with those of pipelines that move together with it."""
    return Participants(pipeline.process_group, pipeline.device, pipeline.meet())
