"""Layers move to other stages while a pipeline computes, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from zeroresize.comm.collectives import time_limit
from zeroresize.comm.meeting import Meet
from zeroresize.pipeline.layer_move_during_backward import LayerMoveDuringBackward
from zeroresize.pipeline.moving_layers import LayerMoveReport, move_layers, participants_of
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.resharding.agreement import meet_prepared, require_received
from zeroresize.resharding.transaction import prepare_transaction
from zeroresize.utils.deadline import within

#: For the other ranks to come at the end of a block that has failed here, whatever it has waited for before.
_LEAST_WAIT = timedelta(seconds=1)


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
    layer follow when its backward is over, the last layer first. The layers are in place at the end of the block.
    Messages are on the CPU, also those of what is on a GPU. New tensors must fit beside all that the pipeline computes
    with: on a GPU beside the most memory that was allocated so far.

    Args:
        boundaries: stage ``s`` then has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
        optimizer: the only one that steps these parameters, given all of ``pipeline.parameters()``; None for none.
        num_steps: how many ``pipeline.step`` add up their gradients within the block: they are final in the last one.
            Whatever changes later all the same, as gradients that are clipped within the block, is right, but then all
            is sent once more at the end.
        max_bytes: of messages that this rank sends and receives at once; at least 2.

    Raises:
        ValueError: as move_layers, before the block.
        NotEnoughMemoryError: as move_layers, before the block, or at its end if all must be sent once more.
        RuntimeError: as move_layers, before the block or at its end; or if the optimizer's state is another one then.
    """
    begin = time.perf_counter()
    make = partial(LayerMoveDuringBackward, pipeline, boundaries, optimizer, max_bytes, num_steps)
    move = prepare_transaction(make, participants_of(pipeline))
    outcome = MoveDuringBackward()
    if not move.moving:
        yield outcome
        outcome.report = LayerMoveReport(num_layers=0, **move.figures(begin) | {"seconds": 0.0})
        return
    _connect(move, pipeline.meet())
    move.start()
    meet = pipeline.meet_aside()
    before_s = time.perf_counter() - begin
    try:
        with move.finished:
            yield outcome
    except BaseException as error:  # an interrupt, too: the others would wait
        _give_up(pipeline, move, error, meet, begin)
        raise
    begin = time.perf_counter()
    failure = move.join()
    try:
        is_outdated = require_received(failure, meet, float(move.is_outdated))
    except RuntimeError:
        pipeline.leave_side_group()  # as ranks do whose block has failed
        raise
    outcome.was_repeated = any(is_outdated)
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


def _connect(move: LayerMoveDuringBackward, meet: Meet) -> None:
    """On all ranks or on none; collective."""
    try:
        move.connect()
        connected: tuple[float, float] | Exception = (0.0, 0.0)
    except Exception as error:  # the others must hear of any
        connected = error
    try:
        meet_prepared(meet, connected, f"an early move of layers to boundaries {list(move.boundaries)}")
    except Exception:
        move.drop()
        raise
