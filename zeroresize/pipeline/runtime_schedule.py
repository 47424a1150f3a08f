"""Steps of a pipeline by this package's own runtime, for micro-batches that differ in shape and may be few.

torch's schedules need equal micro-batches, and 1F1B as many as stages. Here the first stage tells the others the shapes
of a step's micro-batches; each finds the shapes of its messages by running the layers on the meta device once for each
shape that is new.

``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, message_device
from zeroresize.pipeline.boundary_shapes import Boundary, TensorShape, boundary_of, broadcast_text
from zeroresize.pipeline.layer_shapes import LayerShapes
from zeroresize.pipeline.stage_layers import StageLayers
from zeroresize.resharding.agreement import meet_over, meet_prepared
from zeroresize.runtime.activations import Activation, HandedOn
from zeroresize.runtime.communication import instructions_of
from zeroresize.runtime.counted_loss import CountedLoss
from zeroresize.runtime.executor import Executor
from zeroresize.runtime.messages import StageMessages
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.stage import forward_instructions
from zeroresize.utils.autocast_dtype import autocast_dtype
from zeroresize.utils.fingerprint import fingerprint

#: Returns micro-batches and their targets.
Make = Callable[[], tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None]]]
#: Is given targets, on the last stage, and samples of the micro-batches.
Prepare = Callable[[Sequence[Any], Sequence[float]], None]
#: Of so many different steps the shapes are kept.
_MOST_KEPT = 4096


class RuntimeSchedule:
    """Runs the steps of a pipeline; all stages call alike.

    Args:
        schedule: "1f1b" or "gpipe".
        stage: this rank's layers.
        shapes: of what all layers hand on.
        process_group: the pipeline's, first stage first.
        device: of the layers.
        loss: of a micro-batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: StageLayers,
        shapes: LayerShapes,
        process_group: ProcessGroup,
        device: torch.device,
        loss: CountedLoss,
    ) -> None:
        self._schedule, self._layers, self._shapes, self._loss = schedule, stage, shapes, loss
        self._group, self._device = process_group, device
        self._stage, self._num_stages = group_rank(process_group), group_size(process_group)
        self._meet = meet_over(process_group, device)
        self._known: dict[float, list[Boundary]] = {}

    def step(self, make: Make, prepare: Prepare) -> tuple[Tensor | None, list[Boundary]]:
        """Run forward and backward of micro-batches; collective.

        Args:
            make: returns [M] micro-batches, on the first stage, and [M] targets, on the last one.
            prepare: is called before the first forward.

        Returns:
            The loss on the last stage, and [L + 1] boundaries of the first micro-batch.

        Raises:
            ValueError: for no micro-batches, one without samples, another number of targets, layers that do not run on
                the meta device, and autocast.
            Exception: what ``make`` raises; the others raise a RuntimeError then. And what ``prepare`` raises.
            RuntimeError: if a stage does not come.
        """
        microbatches, targets, inputs = self._tell(make, trains=True)
        prepare(targets, [boundary[0].shape[0] for boundary in inputs])
        instructions = instructions_of(self._schedule, self._num_stages, len(inputs))[self._stage]
        computation = _Computation(self, microbatches, targets)
        boundaries = self._run(instructions, computation, inputs)
        return (torch.stack(computation.losses).sum().detach() if computation.losses else None), boundaries

    @torch.no_grad()
    def evaluate(self, make: Make) -> tuple[list[tuple[Tensor, ...]], list[Boundary]]:
        """Return [M] outputs on the last stage, nothing on the others, and boundaries; errors as of :meth:`step`."""
        microbatches, _, inputs = self._tell(make, trains=False)
        computation = _Computation(self, microbatches, None)
        boundaries = self._run(forward_instructions(self._stage, self._num_stages, len(inputs)), computation, inputs)
        return computation.outputs, boundaries

    def _run(self, instructions: Any, computation: _Computation, inputs: Sequence[Boundary]) -> list[Boundary]:
        all_boundaries = [self._shapes.boundaries(boundary) for boundary in inputs]
        present = self._layers.present
        is_first, is_last = self._stage == 0, self._stage == self._num_stages - 1
        edges = [each for each in (None if is_first else present.start, None if is_last else present.stop)]
        handed: list[HandedOn | None] = [None, None]
        sizes: list[dict[str, int]] = [{} for _ in inputs]
        for place, edge in enumerate(edges):
            if edge is not None:
                of_edge = [boundaries[edge] for boundaries in all_boundaries]
                handed[place] = _handed_on(place, of_edge[0])
                for of_microbatch, boundary in zip(sizes, of_edge, strict=True):
                    of_microbatch |= _sizes(place, boundary)
        messages = None if self._num_stages == 1 else StageMessages(self._group, handed[0], handed[1], self._device)
        Executor(messages).run(instructions, computation, sizes)
        return all_boundaries[0]

    def _tell(
        self, make: Make, *, trains: bool
    ) -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None], list[Boundary]]:
        """Micro-batches and targets, where they are, and [M] shapes of inputs; known ones are told by one number."""
        microbatches: Sequence[Sequence[Tensor]] = []
        targets: Sequence[Tensor | None] = []
        text = ""
        prepared: tuple[float, float] | Exception = 0.0, 0.0
        try:
            if autocast_dtype(self._device.type):
                raise ValueError("the runtime's schedules do not run under torch.autocast: torch's own do")
            microbatches, targets = make()
            if self._stage == 0:
                if not microbatches:
                    raise ValueError("a step of no micro-batches: at least one is needed")
                text = json.dumps([[asdict(each) for each in boundary_of(xs)] for xs in microbatches])
            prepared = (fingerprint(text) if text else 0.0), float(len(targets))
        except Exception as error:  # the others must hear of any
            prepared = error
        table = meet_prepared(self._meet, prepared, "a step")
        key, num_targets = table[0][0], int(table[-1][1])
        if key not in self._known:
            if len(self._known) >= _MOST_KEPT:  # on all stages at once
                self._known.clear()
            where = message_device(self._group, self._device)
            described = json.loads(broadcast_text(text, 0, where, self._group))
            self._known[key] = [
                tuple(TensorShape(tuple(one["shape"]), one["dtype"], one["requires_grad"]) for one in boundary)
                for boundary in described
            ]
        inputs = self._known[key]
        empty = [number for number, boundary in enumerate(inputs) if any(one.shape[0] == 0 for one in boundary)]
        if trains and empty:
            raise ValueError(
                f"micro-batches {empty} of {len(inputs)} have no samples, so there is no mean of their losses: leave "
                "them out, or the step on all ranks where the whole batch is empty"
            )
        if trains and num_targets != len(inputs):
            raise ValueError(f"there are {num_targets} targets for {len(inputs)} micro-batches: give one for each")
        return microbatches, targets, inputs


@dataclass
class _Computation:
    """Of one step.

    Attributes:
        losses, outputs: of the micro-batches, on the last stage; losses where it trains, outputs otherwise.
    """

    schedule: RuntimeSchedule
    microbatches: Sequence[Sequence[Tensor]]
    targets: Sequence[Tensor | None] | None

    def __post_init__(self) -> None:
        self.losses: list[Tensor] = []
        self.outputs: list[tuple[Tensor, ...]] = []

    def forward(self, microbatch: int, xs: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        schedule = self.schedule
        ys = schedule._layers(*(self.microbatches[microbatch] if xs is None else xs))
        if schedule._stage < schedule._num_stages - 1:
            return ys if isinstance(ys, tuple) else (ys,)
        if self.targets is None:
            self.outputs.append(ys if isinstance(ys, tuple) else (ys,))
            return ()
        schedule._loss.number = microbatch
        loss = schedule._loss(ys, self.targets[microbatch])
        self.losses.append(loss)
        return (loss,)

    def backward(self, ys: tuple[Tensor, ...], dys: tuple[Tensor, ...] | None) -> None:
        needed = [y for y in ys if y.requires_grad]
        if needed:
            torch.autograd.backward(needed, None if dys is None else list(dys))


def _handed_on(place: int, boundary: Boundary) -> HandedOn:
    return tuple(
        Activation(
            tuple(f"{place}.{number}.{dim}" for dim in range(len(tensor.shape))),
            getattr(torch, tensor.dtype),
            tensor.requires_grad,
        )
        for number, tensor in enumerate(boundary)
    )


def _sizes(place: int, boundary: Boundary) -> dict[str, int]:
    return {
        f"{place}.{number}.{dim}": size
        for number, tensor in enumerate(boundary)
        for dim, size in enumerate(tensor.shape)
    }
