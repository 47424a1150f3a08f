"""Carries out the instructions of one stage of a pipeline, one after another.

Under ``torch.autocast`` a backward runs outside of it: it computes in the types of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.messages import StageMessages

#: Of a micro-batch and what the stage before has handed on, None on the first stage, returns what is handed on; on the
#: last stage the loss alone.
Forward = Callable[[int, tuple[Tensor, ...] | None], tuple[Tensor, ...]]

#: What :meth:`Executor.first_forward` carries out.
_FIRST = frozenset(
    Instruction(kind, 0) for kind in (Kind.RECV_ACT_START, Kind.WAIT_RECV_ACT, Kind.FORWARD, Kind.SEND_ACT_START)
)


class Executor:
    """Carries out what a stage is told in a step; all stages of a pipeline do so at once.

    What a forward was given and has returned is kept until its backward; received activations from the wait for them
    on, gradients until the next wait.

    Args:
        forward: of this stage.
        messages: with the stages beside it; None where there is one stage only.
        trains: whether there are backwards; else nothing is kept.
        on_computed: is told each forward and backward once it is over; on a GPU once it is queued.
    """

    def __init__(
        self,
        forward: Forward,
        messages: StageMessages[Any] | None,
        *,
        trains: bool,
        on_computed: Callable[[Instruction], object] | None = None,
    ) -> None:
        self._compute, self._messages, self._trains, self._on_computed = forward, messages, trains, on_computed
        self._xs: dict[int, tuple[Tensor, ...]] = {}
        self._ys: dict[int, tuple[Tensor, ...]] = {}
        self._dys: dict[int, tuple[Tensor | None, ...]] = {}
        self._dxs: dict[int, tuple[Tensor, ...]] = {}
        self._done: frozenset[Instruction] = frozenset()

    def first_forward(self) -> None:
        """Carry out the forward of the first micro-batch ahead of all else, with messages of unknown shapes.

        Where it fails the stages behind raise a RuntimeError.
        """
        self._done = _FIRST
        messages = self._messages
        try:
            if messages is not None and messages.has_before:
                self._exchange(Instruction(Kind.RECV_ACT_START, 0))
                self._exchange(Instruction(Kind.WAIT_RECV_ACT, 0))
            self._forward(0)
        except Exception:
            if messages is not None and messages.has_behind:
                with suppress(RuntimeError):  # of a message: this stage's error says more
                    messages.send_failure(Instruction(Kind.SEND_ACT_START, 0))
            raise
        if messages is not None and messages.has_behind:
            self._exchange(Instruction(Kind.SEND_ACT_START, 0))

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carry out a step, whose instructions go well with those of the other stages.

        Raises:
            ValueError: for a message on a side where no stage is, and for what layers hand on unexpectedly.
            RuntimeError: if another stage does not come, naming it, the message and its micro-batch.
        """
        for instruction in instructions:
            if instruction in self._done:
                continue
            if instruction.kind is Kind.FORWARD:
                self._forward(instruction.microbatch)
            elif instruction.kind is Kind.BACKWARD:
                self._backward(instruction.microbatch)
            else:
                self._exchange(instruction)

    def _exchange(self, instruction: Instruction) -> None:
        kind, microbatch = instruction
        if self._messages is None:
            raise ValueError(f"a pipeline of one stage is told {instruction}: it has nobody to exchange with")
        if kind is Kind.SEND_ACT_START:
            self._messages.send(instruction, self._ys[microbatch] if self._trains else self._ys.pop(microbatch))
        elif kind is Kind.SEND_GRAD_START:
            self._messages.send(instruction, self._dxs.pop(microbatch))
        elif kind.starts:
            self._messages.receive(instruction)
        elif kind is Kind.WAIT_RECV_ACT:
            self._xs[microbatch] = self._messages.wait(instruction)
        elif kind is Kind.WAIT_RECV_GRAD:
            self._dys[microbatch] = self._messages.wait(instruction)
        else:
            self._messages.wait(instruction)

    def _forward(self, microbatch: int) -> None:
        xs = self._xs.get(microbatch) if self._trains else self._xs.pop(microbatch, None)
        self._ys[microbatch] = self._compute(microbatch, xs)
        self._tell(Kind.FORWARD, microbatch)

    def _backward(self, microbatch: int) -> None:
        xs, ys = self._xs.pop(microbatch, None), self._ys.pop(microbatch)
        dys = self._dys.pop(microbatch, (None,) * len(ys))
        needed = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        if needed:
            with torch.autocast(ys[0].device.type, enabled=False):
                torch.autograd.backward([y for y, _ in needed], [dy for _, dy in needed])
        if xs is not None:
            wanted = (x for x in xs if x.requires_grad)
            self._dxs[microbatch] = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in wanted)
        self._tell(Kind.BACKWARD, microbatch)

    def _tell(self, kind: Kind, microbatch: int) -> None:
        if self._on_computed is not None:
            self._on_computed(Instruction(kind, microbatch))
