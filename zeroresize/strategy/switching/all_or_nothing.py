"""Switches that all ranks make, or none: two small meetings, one before anything travels and one after."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zeroresize.resharding.agreement import Meet, allocate_together, failure_of, require_received, require_same
from zeroresize.strategy.switching.flow_transport import FlowTransport
from zeroresize.strategy.switching.switch import SwitchReport


class Moving(Protocol):
    """A rank's part of a switch."""

    fingerprint: float
    new_bytes: int
    transport: FlowTransport

    def allocate(self, device: torch.device) -> None: ...

    def carry_out(self) -> Exception | None: ...

    def install(self) -> None: ...


def carried_out(make: Callable[[], Moving], meet: Meet, device: torch.device, held_bytes: int) -> SwitchReport:
    """Make and carry out a switch; collective.

    Args:
        make: makes this rank's part; what it raises is told to the others.
        held_bytes: that this rank holds before of what may move.

    Raises:
        ValueError: that ``make`` raises; the other ranks raise a RuntimeError.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in the switch, or one dies or fails; it names them.
            Weights and optimizer state are as they were then.
    """
    begin = time.perf_counter()
    moving: Moving | Exception
    try:
        moving = make()
    except Exception as error:  # the others must hear of any
        moving = error
    told: list[Sequence[float]] = []

    def meet_with_fingerprint(*numbers: float) -> Sequence[Sequence[float]]:
        told[:] = meet(*numbers, 0.0 if isinstance(moving, Exception) else moving.fingerprint)
        return told

    def allocate() -> None:
        if isinstance(moving, Exception):
            raise moving
        moving.allocate(device)

    needed = 0 if isinstance(moving, Exception) else moving.new_bytes + moving.transport.buffer_bytes
    allocate_together(needed, device, allocate, meet_with_fingerprint)
    assert not isinstance(moving, Exception)
    require_same([row[2] for row in told], "where the switch leads, or how it was planned", meet)
    failure = failure_of(moving.carry_out)
    if device.type == "cuda":  # a wait only orders streams: nothing has been received before this
        torch.cuda.synchronize(device)
    require_received(failure, meet)
    moving.install()
    transport = moving.transport
    return SwitchReport(
        time.perf_counter() - begin,
        transport.sent_bytes,
        transport.received_bytes,
        transport.num_rounds,
        moving.new_bytes,
        transport.buffer_bytes,
        held_bytes + needed,
    )
