"""Carries out the instructions of one stage of a pipeline, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.messages import StageMessages


class Computation(Protocol):
    """What a stage computes of a micro-batch."""

    def forward(self, microbatch: int, xs: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return what is handed on, or on the last stage the loss alone.

        Args:
            xs: what the stage before has handed on; None on the first stage.
        """

    def backward(self, ys: tuple[Tensor, ...], dys: tuple[Tensor, ...] | None) -> None:
        """Add the gradients to those of parameters and inputs.

        Args:
            ys: what the forward returned.
            dys: its gradients; None on the last stage.
        """


class Executor:
    """Carries out what a stage is told; all stages of a pipeline do so at once.

    What a forward was given and has returned is kept until its backward; received activations from the wait for them
    on, gradients until the next wait.

    Args:
        messages: with the stages beside it; None where there is one stage only.
        on_computed: is told each forward and backward once it is over; on a GPU once it is queued.
    """

    def __init__(
        self, messages: StageMessages | None, on_computed: Callable[[Instruction], object] | None = None
    ) -> None:
        self._messages, self._on_computed = messages, on_computed

    def run(
        self, instructions: Sequence[Instruction], computation: Computation, sizes: Sequence[Mapping[str, int]]
    ) -> None:
        """Carry out a step, whose instructions go well with those of the other stages.

        Without backwards, as where a model is evaluated, nothing is kept.

        Args:
            sizes: [M] of each micro-batch.

        Raises:
            ValueError: for a message on a side where no stage is, and for what layers hand on unexpectedly.
            RuntimeError: if another stage does not come, naming it, the message and its micro-batch.
        """
        _Run(self._messages, computation, sizes, self._on_computed, _has_backwards(instructions)).carry_out(
            instructions
        )


class _Run:
    """The tensors of a step."""

    def __init__(
        self,
        messages: StageMessages | None,
        computation: Computation,
        sizes: Sequence[Mapping[str, int]],
        on_computed: Callable[[Instruction], object] | None,
        has_backwards: bool,
    ) -> None:
        self._messages, self._computation, self._sizes = messages, computation, sizes
        self._on_computed, self._has_backwards = on_computed, has_backwards
        self._xs: dict[int, tuple[Tensor, ...]] = {}
        self._ys: dict[int, tuple[Tensor, ...]] = {}
        self._dys: dict[int, tuple[Tensor, ...]] = {}
        self._dxs: dict[int, tuple[Tensor, ...]] = {}

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            kind, microbatch = instruction
            if kind is Kind.FORWARD:
                self._forward(microbatch)
            elif kind is Kind.BACKWARD:
                self._backward(microbatch)
            else:
                self._exchange(instruction)
            if self._on_computed is not None and kind.computes:
                self._on_computed(instruction)

    def _exchange(self, instruction: Instruction) -> None:
        kind, microbatch = instruction
        if self._messages is None:
            raise ValueError(f"a pipeline of one stage is told {instruction}: it has nobody to exchange with")
        if kind is Kind.SEND_ACT_START:
            ys = self._ys[microbatch] if self._has_backwards else self._ys.pop(microbatch)
            self._messages.send(instruction, ys, self._sizes[microbatch])
        elif kind is Kind.SEND_GRAD_START:
            self._messages.send(instruction, self._dxs.pop(microbatch), self._sizes[microbatch])
        elif kind.starts:
            self._messages.receive(instruction, self._sizes[microbatch])
        else:
            tensors = self._messages.wait(instruction)
            if kind is Kind.WAIT_RECV_ACT:
                self._xs[microbatch] = tensors
            elif kind is Kind.WAIT_RECV_GRAD:
                self._dys[microbatch] = tensors

    def _forward(self, microbatch: int) -> None:
        xs = self._xs.get(microbatch) if self._has_backwards else self._xs.pop(microbatch, None)
        ys = self._computation.forward(microbatch, xs)
        self._ys[microbatch] = ys

    def _backward(self, microbatch: int) -> None:
        xs, ys = self._xs.pop(microbatch, None), self._ys.pop(microbatch)
        self._computation.backward(ys, self._dys.pop(microbatch, None))
        if xs is not None:
            needed = (x for x in xs if x.requires_grad)
            self._dxs[microbatch] = tuple(x.grad if x.grad is not None else torch.zeros_like(x) for x in needed)


def _has_backwards(instructions: Sequence[Instruction]) -> bool:
    return any(instruction.kind is Kind.BACKWARD for instruction in instructions)
