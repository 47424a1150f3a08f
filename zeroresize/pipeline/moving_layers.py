"""Layers move from one stage of a pipeline to another, between two steps or while it computes, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from zeroresize.comm.collectives import time_limit
from zeroresize.comm.exchange import Meet
from zeroresize.pipeline.layer_move import LayerMove, LayerMoveDuringBackward
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.resharding.agreement import agreed, require_received
from zeroresize.resharding.transaction import (
    MoveReport,
    Participants,
    prepare_transaction,
    receive_transaction,
    run_transaction,
)
from zeroresize.utils.deadline import within

#: For the other ranks to come at the end of a block that has failed here, whatever it has waited for before.
_LEAST_WAIT = timedelta(seconds=1)


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
    optimizer's parameter groups stay; see :class:`Pipeline`. Tied parameters travel to stages that have no copy.

    All or nothing: nobody changes anything before every rank has received all. Until then a rank holds the layers that
    come beside those that go, and messages of at most ``max_bytes``.

    Args:
        boundaries: stage ``s`` then has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
        optimizer: the only one that steps these parameters, given all of ``pipeline.parameters()``; None for none.
        max_bytes: of messages that this rank sends and receives at once; at least 2.

    Raises:
        ValueError: for boundaries that do not fit, layers inside wrappers of data parallelism, a reference to a
            parameter of a layer on another stage, an optimizer that is a wrapper or ZeRO, or does not step all
            parameters that want gradients, or state that cannot move; the other ranks raise a RuntimeError.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in boundaries or the optimizer's settings, or one dies
            or fails; it names them. After any of these everything is as it was. Only what ``set_extra_state`` of a
            layer raises, and a rank that dies just when the last one has received all, can leave others with layers
            moved.
    """
    begin = time.perf_counter()
    move = run_transaction(lambda: LayerMove(pipeline, boundaries, optimizer, max_bytes), participants_of(pipeline))
    return LayerMoveReport(num_layers=move.num_layers, **move.figures(begin))


@dataclass
class MoveDuringBackward:
    """Reports what becomes of a move that is made while the pipeline computes.

    Attributes:
        report: once it is made. Its seconds are those before and after the block: by so much it has become longer.
        was_repeated: whether something had changed after it was sent, so all was sent once more at the end.
    """

    report: LayerMoveReport | None = None
    was_repeated: bool = False


@contextmanager
def moving_during_backward(
    pipeline: Pipeline,
    boundaries: Sequence[int],
    *,
    optimizer: object | None,
    num_steps: int = 1,
    max_bytes: int = 64 * 2**20,
) -> Iterator[MoveDuringBackward]:
    """Give the pipeline's stages other layers while they compute; collective, around the steps of one optimizer step::

        with moving_during_backward(pipeline, boundaries, optimizer=optimizer) as move:
            pipeline.step(inputs, target=target)
        optimizer.step()

    As :func:`~zeroresize.pipeline.move_layers`, bit for bit and all or nothing; but messages travel meanwhile, on a
    group of their own that its first use makes. Weights and optimizer state go first. The gradients and buffers of a
    layer follow when its backward is over, the last layer first; gradients of tied parameters, which are summed before,
    at the end of the block. Then the layers are in place. Messages are on the CPU, also those of what is on a GPU. New
    tensors must fit beside all that the pipeline computes with: on a GPU beside the most memory allocated so far.

    Args:
        boundaries: stage ``s`` then has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
        optimizer: the only one that steps these parameters, given all of ``pipeline.parameters()``; None for none.
        num_steps: how many ``pipeline.step`` add up their gradients within the block: they are final in the last one.
            Whatever changes later all the same, as gradients that are clipped within the block, the steps of an
            optimizer there, or extra state that grows, is right, but then all is sent once more at the end.
        max_bytes: of messages that this rank sends and receives at once; at least 2.

    Raises:
        ValueError: as move_layers, before the block.
        NotEnoughMemoryError: as move_layers, before the block, or at its end if all must be sent once more.
        RuntimeError: as move_layers, before the block or at its end.
    """
    begin = time.perf_counter()
    make = partial(LayerMoveDuringBackward, pipeline, boundaries, optimizer, max_bytes, num_steps)
    move = prepare_transaction(make, participants_of(pipeline))
    outcome = MoveDuringBackward()
    if not move.moving:
        yield outcome
        outcome.report = LayerMoveReport(num_layers=0, **move.figures(begin) | {"seconds": 0.0})
        return
    try:  # on all ranks or on none
        what = f"an early move of layers to boundaries {list(move.boundaries)}"
        agreed(pipeline.meet(), move.connect, what=what, moves=True)
    except Exception:
        move.drop()
        raise
    move.begin()
    meet = pipeline.meet_aside()
    before_s = time.perf_counter() - begin
    try:
        with move.finished:
            yield outcome
    except BaseException as error:  # an interrupt, too: the others would wait
        _give_up(pipeline, move, error, meet, begin)
        raise
    begin = time.perf_counter()
    try:
        outcome.was_repeated = receive_transaction(move, replace(participants_of(pipeline), meet=meet))
    except RuntimeError:
        pipeline.leave_side_group()  # as ranks do whose block has failed
        raise
    if outcome.was_repeated:
        del move  # its new tensors: their memory is needed for those that come now
        report = move_layers(pipeline, boundaries, optimizer=optimizer, max_bytes=max_bytes)
    else:
        move.commit()
        report = LayerMoveReport(num_layers=move.num_layers, **move.figures(begin))
    outcome.report = replace(report, seconds=before_s + time.perf_counter() - begin)


def _give_up(pipeline: Pipeline, move: LayerMoveDuringBackward, error: BaseException, meet: Meet, begin: float) -> None:
    """Tell the other ranks that the block has failed here, and wait for them for what is left of the time limit.

    A step that has failed may have waited for as long already, for a rank that will not come to this either. The side
    group is left: messages may be under way in it.
    """

    def tell() -> None:
        move.wait()
        require_received(error, meet)

    left = time_limit(pipeline.process_group) - timedelta(seconds=time.perf_counter() - begin)
    try:
        with suppress(Exception):  # the error of the block says more
            within(max(left, _LEAST_WAIT), tell)
    finally:  # also where an interrupt ends this wait
        pipeline.leave_side_group()


def participants_of(pipeline: Pipeline) -> Participants:
    """Return the ranks of a pipeline as participants, with those of pipelines that move together with it."""
    return Participants(pipeline.process_group, pipeline.device, pipeline.meet())
