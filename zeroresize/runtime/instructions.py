"""What a stage of a pipeline is told to do, one after another (DynaPipe, section 3).

A message is two instructions on either side: one that starts it, and one that waits until it is there, or sent.
Activations go from a stage to the next one, gradients to the one before.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kinds of instructions, by the names of DynaPipe's paper."""

    FORWARD = "Forward"
    BACKWARD = "Backward"
    SEND_ACT_START = "SendActStart"
    RECV_ACT_START = "RecvActStart"
    SEND_GRAD_START = "SendGradStart"
    RECV_GRAD_START = "RecvGradStart"
    WAIT_SEND_ACT = "WaitSendAct"
    WAIT_RECV_ACT = "WaitRecvAct"
    WAIT_SEND_GRAD = "WaitSendGrad"
    WAIT_RECV_GRAD = "WaitRecvGrad"

    __hash__ = object.__hash__  # by identity, several times as fast as by name

    def __repr__(self) -> str:
        return self.value

    @property
    def computes(self) -> bool:
        """Whether it is a forward or a backward."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def starts(self) -> bool:
        """Whether it starts a message."""
        return self in _WAITS

    @property
    def wait(self) -> Kind:
        """The kind that waits for what this one starts.

        Raises:
            KeyError: for a kind that starts nothing.
        """
        return _WAITS[self]

    @property
    def start(self) -> Kind:
        """The kind that starts what this one waits for.

        Raises:
            KeyError: for a kind that waits for nothing.
        """
        return _STARTS[self]

    @property
    def peer(self) -> int:
        """How far the other stage is: 1 for the next one, −1 for the one before, 0 for computing."""
        return _PEERS[self]


_WAITS = {
    Kind.SEND_ACT_START: Kind.WAIT_SEND_ACT,
    Kind.RECV_ACT_START: Kind.WAIT_RECV_ACT,
    Kind.SEND_GRAD_START: Kind.WAIT_SEND_GRAD,
    Kind.RECV_GRAD_START: Kind.WAIT_RECV_GRAD,
}
_STARTS = {wait: start for start, wait in _WAITS.items()}
_PEERS = {
    Kind.FORWARD: 0,
    Kind.BACKWARD: 0,
    Kind.SEND_ACT_START: 1,
    Kind.WAIT_SEND_ACT: 1,
    Kind.RECV_GRAD_START: 1,
    Kind.WAIT_RECV_GRAD: 1,
    Kind.RECV_ACT_START: -1,
    Kind.WAIT_RECV_ACT: -1,
    Kind.SEND_GRAD_START: -1,
    Kind.WAIT_SEND_GRAD: -1,
}


class Instruction(NamedTuple):
    """Describe one thing to do, with a micro-batch or a message of it."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}({self.microbatch})"
