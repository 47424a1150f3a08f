"""Steps of one stage of a pipeline, for micro-batches of any shape and number.

The first stage tells the others the shapes of a step's micro-batches. What layers hand to the next stage is known of
micro-batches of which it was the same before, and told with the message itself of others. A first step begins with the
forward of one micro-batch through all stages, after which they meet: a layer that fails then fails on all.

``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import broadcast, group_rank, group_size, message_device
from zeroresize.pipeline.stage_layers import LayerWatcher, StageLayers
from zeroresize.resharding.agreement import agreed, gather_texts, meet_over
from zeroresize.runtime.activations import Boundary, as_tuple, boundary_of, from_text, message_bytes, to_text
from zeroresize.runtime.counted_loss import CountedLoss
from zeroresize.runtime.executor import Executor
from zeroresize.runtime.instructions import Instruction, Kind, forward_instructions, instructions_of
from zeroresize.runtime.messages import StageMessages
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.stage import weights_cast_anew
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_state import autocast_dtype

#: Returns micro-batches and their targets.
Make = Callable[[], tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None]]]
#: Is given targets, on the last stage, and samples of the micro-batches.
Prepare = Callable[[Sequence[Any], Sequence[float]], None]
#: What a micro-batch hands on depends on: a number of what all stages are like, and its inputs.
Key = tuple[float, Boundary]
#: Of so many different steps, and micro-batches, the shapes are kept.
_MOST_KEPT = 4096
#: In place of what a stage is like: it has forgotten what it knew.
_FORGOTTEN = -1.0


class StageSteps:
    """Runs the steps of a pipeline's stage; all stages call alike.

    Bytes of a micro-batch's message at each boundary, ``message_bytes`` [L + 1], are known from the first step on, as
    :func:`~zeroresize.runtime.activations.message_bytes` counts them.
    """

    def __init__(self, schedule: Schedule, layers: StageLayers, device: torch.device, loss: CountedLoss) -> None:
        self._schedule, self._layers, self._device, self._loss = schedule, layers, device, loss
        self.message_bytes: tuple[float, ...] | None = None
        self._inputs: dict[float, list[Boundary]] = {}
        self._before: dict[Key, Boundary] = {}
        self._behind: dict[Key, Boundary] = {}
        self._tried: set[bool] = set()
        self._has_failed = False

    def follow(self, process_group: ProcessGroup) -> None:
        """Run other layers from now on, or over another group, first stage first."""
        self._group, self._meet = process_group, meet_over(process_group, self._device)
        self._stage, self._num_stages = group_rank(process_group), group_size(process_group)
        self._forget()

    def refresh(self) -> None:
        """Begin as in a first step."""
        self._forget()
        self._tried.clear()
        self.message_bytes = None

    @weights_cast_anew()
    def step(self, make: Make, prepare: Prepare) -> Tensor | None:
        """Run forward and backward of micro-batches, and return the loss on the last stage; collective.

        Args:
            make: returns [M] micro-batches, on the first stage, and [M] targets, on the last one.
            prepare: is called before the first forward.

        Raises:
            ValueError: for no micro-batches, one without samples, and another number of targets.
            Exception: what ``make`` raises; the others raise a RuntimeError then. And what ``prepare`` raises.
            RuntimeError: if a stage does not come; in a first step also where the forward fails on any stage.
        """
        microbatches, targets, inputs, keys = self._tell(make, trains=True)
        prepare(targets, [boundary[0].shape[0] for boundary in inputs])
        instructions = instructions_of(self._schedule, self._num_stages, len(inputs))[self._stage]
        losses: list[Tensor] = []
        watchers = self._layers.watchers
        watchers.step_begins(len(inputs))

        def finish(microbatch: int, ys: Any) -> tuple[Tensor, ...]:
            self._loss.number = microbatch
            loss = watchers.call(len(self._layers.layers), self._loss, ys, targets[microbatch])
            losses.append(loss)
            return (loss,)

        self._run(instructions, microbatches, finish, keys, trains=True)
        return torch.stack(losses).sum().detach() if losses else None

    @torch.no_grad()
    @weights_cast_anew()
    def evaluate(self, make: Make) -> list[tuple[Tensor, ...]]:
        """Return [M] outputs on the last stage, nothing on the others; errors as of :meth:`step`."""
        microbatches, _, inputs, keys = self._tell(make, trains=False)
        instructions = forward_instructions(self._stage, self._num_stages, len(inputs))
        outputs: list[tuple[Tensor, ...]] = []

        def finish(microbatch: int, ys: Any) -> tuple[Tensor, ...]:
            outputs.append(as_tuple(ys))
            return ()

        self._run(instructions, microbatches, finish, keys, trains=False)
        return outputs

    def _run(
        self,
        instructions: Sequence[Instruction],
        microbatches: Sequence[Sequence[Tensor]],
        finish: Callable[[int, Any], tuple[Tensor, ...]],
        keys: Sequence[Key],
        *,
        trains: bool,
    ) -> None:
        is_last = self._stage == self._num_stages - 1

        def forward(microbatch: int, xs: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
            ys = self._layers(*(microbatches[microbatch] if xs is None else xs))
            return finish(microbatch, ys) if is_last else as_tuple(ys)

        messages = None
        if self._num_stages > 1:
            messages = StageMessages(self._group, self._device, keys, self._before, self._behind)
        executor = Executor(forward, messages, trains=trains, on_computed=self._computed)
        try:
            if trains not in self._tried:
                self._first_forward(executor, trains=trains)
            executor.carry_out(instructions)
        except BaseException:
            self._has_failed = True
            raise

    def _computed(self, instruction: Instruction) -> None:
        if instruction.kind is Kind.BACKWARD:
            self._layers.watchers.backward_ends()

    def _first_forward(self, executor: Executor, *, trains: bool) -> None:
        """Of all stages; collective."""
        text, failure = "", None
        with _Seen(self._layers) as seen:
            try:
                executor.first_forward()
            except Exception as error:  # the others must hear of any
                text, failure = f"the first forward fails on stage {self._stage}: {seen.described(error)}", error
        table = self._meet(float(failure is not None), *seen.num_bytes)
        if any(has_failed for has_failed, *_ in table):
            texts = gather_texts(text, self._meet, self._group, message_device(self._group, self._device))
            raise RuntimeError(next(filter(None, texts))) from failure
        self._tried.add(trains)
        if trains:
            self.message_bytes = tuple(map(sum, zip(*(row for _, *row in table), strict=True)))

    def _tell(
        self, make: Make, *, trains: bool
    ) -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None], list[Boundary], list[Key]]:
        """Micro-batches and targets, where they are; [M] shapes of inputs, told by one number where they are known, and
        keys of what is handed on."""

        def made() -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None], bytes]:
            microbatches, targets = make()
            if self._stage:
                return microbatches, targets, b""
            if not microbatches:
                raise ValueError("a step of no micro-batches: at least one is needed")
            return microbatches, targets, to_text([boundary_of(xs) for xs in microbatches]).encode()

        (microbatches, targets, data), table = agreed(
            self._meet,
            made,
            lambda made: (fingerprint(made[2]), len(made[2]), len(made[1]), self._state(trains)),
            what="a step",
        )
        (step, length, _, _), num_targets = table[0], int(table[-1][2])
        states = [state for *_, state in table]
        if _FORGOTTEN in states or max(len(self._inputs), len(self._before), len(self._behind)) >= _MOST_KEPT:
            self._forget()  # on all stages at once
        if step not in self._inputs:
            buffer = bytearray(data or int(length))
            text = torch.frombuffer(buffer, dtype=torch.uint8).to(message_device(self._group, self._device))
            broadcast(text, 0, self._group)
            self._inputs[step] = from_text(bytes(text.tolist()).decode())
        inputs = self._inputs[step]
        empty = [number for number, boundary in enumerate(inputs) if any(one.shape[0] == 0 for one in boundary)]
        if trains and empty:
            raise ValueError(
                f"micro-batches {empty} of {len(inputs)} have no samples, so there is no mean of their losses: leave "
                "them out, or the step on all ranks where the whole batch is empty"
            )
        if trains and num_targets != len(inputs):
            raise ValueError(f"there are {num_targets} targets for {len(inputs)} micro-batches: give one for each")
        state = fingerprint(str(states))
        return microbatches, targets, inputs, [(state, boundary) for boundary in inputs]

    def _state(self, trains: bool) -> float:
        """A number of what this stage's outputs depend on beside its inputs."""
        if self._has_failed:
            return _FORGOTTEN
        layers = (self._layers.layers[number] for number in self._layers.present)
        learns = "".join(str(int(one.requires_grad)) for layer in layers for one in layer.parameters())
        return fingerprint(f"{trains} {autocast_dtype(self._device.type)} {learns}")

    def _forget(self) -> None:
        for known in (self._inputs, self._before, self._behind):
            known.clear()
        self._has_failed = False


class _Seen(LayerWatcher):
    """What layers are given, and the loss, with bytes of messages [L + 1]."""

    def __init__(self, layers: StageLayers) -> None:
        super().__init__(layers.watchers)
        self._layers, self.num_bytes = layers.layers, [0.0] * (len(layers.layers) + 1)
        self._last: tuple[int, Boundary] | None = None

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        boundary = boundary_of(as_tuple(inputs[0]) if number == len(self._layers) else inputs)
        self._last, self.num_bytes[number] = (number, boundary), message_bytes(boundary)

    def described(self, error: Exception) -> str:
        """An error, by the layer that was run last."""
        kind = f"{type(error).__name__}: {error}"
        if self._last is None:
            return kind
        number, inputs = self._last
        given = ", ".join(f"{each.dtype} {list(each.shape)}" for each in inputs)
        if number == len(self._layers):
            return f"the loss, called with ({given}), raises {kind}"
        return (
            f"layers.{number} ({type(self._layers[number]).__name__}), called with ({given}), raises {kind}. A layer "
            "of a pipeline gets what the layer before returns and nothing else: one that wants more, such as a decoder "
            "layer of transformers, needs a module around it that makes it"
        )
