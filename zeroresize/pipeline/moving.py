"""Layers move from one stage of a pipeline to another between two steps, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.resharding.agreement import (
    allocate_together,
    failure_of,
    meet_prepared,
    require_received,
    require_same,
    texts_of_ranks,
)

MoveT = TypeVar("MoveT", bound=LayerMove)
_PLAN = "the boundaries of the stages, before or after, which of them stay, or max_bytes"


@dataclass(frozen=True)
class LayerMoveReport:
    """What a move was on this rank.

    Attributes:
        num_layers: how many changed stages, in the whole pipeline.
        sent_bytes, received_bytes: by this rank: parameters, buffers, gradients and optimizer state.
        seconds: wall time of the whole move.
        num_rounds: in which messages were sent.
        buffer_bytes: memory of this rank's messages, sent and received, at most at once.
    """

    num_layers: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    num_rounds: int
    buffer_bytes: int


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
            different stages, an optimizer that is a wrapper or ZeRO, or state that cannot move; the other ranks raise a
            RuntimeError.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in boundaries or the optimizer's settings, or one dies
            or fails; it names them. After any of these everything is as it was. Only what ``set_extra_state`` of a
            layer raises, and a rank that dies just when the last one has received all, can leave others with layers
            moved.
    """
    begin = time.perf_counter()
    move = received_move(pipeline, lambda: LayerMove(pipeline, boundaries, optimizer, max_bytes))
    if move.moving:
        move.install()
        pipeline.follow(move.boundaries)
    return LayerMoveReport(
        sum(map(len, move.moving.values())),
        move.streams.sent_bytes,
        move.streams.received_bytes,
        time.perf_counter() - begin,
        move.streams.num_rounds,
        move.streams.buffer_bytes,
    )


def received_move(pipeline: Pipeline, make: Callable[[], LayerMove]) -> LayerMove:
    """All of a move but its end: every rank has received what comes to it, and nothing has changed; collective.

    Raises:
        Exception: as :func:`move_layers`.
    """
    move = prepared(pipeline, make)
    require_received(failure_of(move.carry_out), pipeline.meet())
    return move


def prepared(pipeline: Pipeline, make: Callable[[], MoveT]) -> MoveT:
    """A move on which all ranks have agreed, with the memory that it takes; collective.

    Args:
        make: makes this rank's part; what it raises is told to the others.

    Raises:
        Exception: as :func:`move_layers`, before anything has changed.
    """
    meet = pipeline.meet()
    numbers: tuple[float, float] | Exception
    try:
        move = make()
        own = move.told()
        numbers = move.plan, move.settings
    except Exception as error:  # the others must hear of any
        numbers = error
    table = meet_prepared(meet, numbers)
    require_same([plan for plan, *_ in table], _PLAN, meet)
    require_same([settings for _, settings, *_ in table], "the settings of the optimizer's parameter groups", meet)
    told = texts_of_ranks(own, meet, pipeline.process_group, pipeline.meet_device)
    agreed: tuple[float, float] | Exception = (0.0, 0.0)
    try:
        move.agree(told)
    except Exception as error:  # the others must hear of any
        agreed = error
    meet_prepared(meet, agreed, f"a move of layers to boundaries {list(move.boundaries)}")
    needed = move.new_bytes + move.streams.buffer_bytes + move.reserved_bytes
    allocate_together(needed, pipeline.device, move.allocate, meet, "new tensors of layers that move")
    return move
