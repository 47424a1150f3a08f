"""Each stage has a part in a move of layers, between two steps or while it computes: it sends and receives some.

Beside a backward, weights and optimizer state travel first: they stay as they are until the optimizer's step. A layer's
gradients, its buffers and its extra state travel as soon as the stage is done with it, the last layer first: backward
comes to it first. There is room for every gradient that may come. Whatever is another at the end than it was when it
was sent, or does not fit into its room, makes the move outdated.

Tied parameters travel apart from their layers, numbered behind them: to stages that get a layer with one and have none
yet. Beside a backward their gradients come last: they are final when they have been summed over the stages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.layers.whole_parameters import require_references_within_stages, require_whole_parameters
from zeroresize.pipeline.layer_contents import (
    Arrived,
    LayerNote,
    TensorNote,
    bytes_of,
    describe,
    let_go,
    notes_from_json,
    notes_to_json,
    require_fitting,
)
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import LayerWatcher
from zeroresize.plan.partition import Partition
from zeroresize.resharding.agreement import bytes_up_to_peak
from zeroresize.resharding.parameter_state import groups_of, require_movable_state, settings_of
from zeroresize.resharding.parcels import End, Pair, Parcel, RankRounds
from zeroresize.resharding.transaction import Transaction
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_private import version_of


class LayerMove(Transaction):
    """Moves layers between the stages, as seen by this rank.

    Args:
        boundaries: after the move.
        max_bytes: of messages at once.
        stages: that have layers then, ascending: stage i of ``boundaries`` is ``stages[i]`` of now; None for all.

    Attributes:
        stages: as given.
        moving: the layers that move, in the whole pipeline.
        parcels: all tensors that move, as bytes; known once all ranks have agreed.

    Raises:
        ValueError: for what cannot move; see :func:`~zeroresize.pipeline.move_layers`.
    """

    plan_name = (
        "the boundaries of the stages, before or after, which of them stay, max_bytes, or the settings of the "
        "optimizer's parameter groups"
    )
    memory_name = "new tensors of layers that move"
    #: Whether gradients that may yet come have room in the move.
    with_room = False

    def __init__(
        self,
        pipeline: Pipeline,
        boundaries: Sequence[int],
        optimizer: object | None,
        max_bytes: int,
        stages: Sequence[int] | None = None,
    ) -> None:
        super().__init__(pipeline.process_group, pipeline.device)
        self._pipeline, self._max_bytes = pipeline, max_bytes
        self._ties, self._num_layers = pipeline.ties, len(pipeline.layers)
        self._layers = [*pipeline.layers, *(nn.Module() for _ in self._ties)]
        self._layer_tensors = [
            *(each.without(self._ties) for each in pipeline.tensors),
            *(tie.tensors for tie in self._ties),
        ]
        if max_bytes < 2:
            raise ValueError(f"max_bytes={max_bytes} is too small: it must be at least 2")
        self.stages = tuple(range(pipeline.num_stages)) if stages is None else tuple(stages)
        after = Partition.of(boundaries, self._num_layers, len(self.stages))
        self.boundaries = after.boundaries
        self.title = f"a move of layers to boundaries {list(self.boundaries)}"
        require_whole_parameters(self._layers)
        require_references_within_stages(self._layers[: self._num_layers], after.stages)
        pipeline.require_same_parameters()
        self._optimizer = require_movable_state(optimizer, dict(pipeline.named_parameters()))
        self._groups = groups_of(self._optimizer)
        before = Partition(pipeline.boundaries)
        self.moving = before.transfers_to(after, self.stages)
        self._leaving = [layer for layer, source, _ in self.moving if source == self._rank]
        self._routes: dict[int, tuple[Pair, ...]] = {layer: ((source, to),) for layer, source, to in self.moving}
        stages_after = [self.stages[stage] for stage in after.stages]
        for number, tie in enumerate(self._ties, self._num_layers):
            held, wanted = tie.holders(before.stages), tie.holders(stages_after)
            self._routes[number] = tuple((held[0], stage) for stage in wanted if stage not in held)
            self._leaving += [number] if self._rank in held and self._rank not in wanted else []
        self._sent: dict[int, tuple[LayerNote, list[Tensor]]] = {
            number: self._described(number)
            for number, routes in self._routes.items()
            if any(source == self._rank for source, _ in routes)
        }
        self._coming = [number for number, routes in self._routes.items() if any(to == self._rank for _, to in routes)]
        plan = [type(self).__name__, pipeline.boundaries, self.boundaries, self.stages, max_bytes]
        self.plan = fingerprint(json.dumps([*plan, settings_of(self._optimizer)]))

    @property
    def num_layers(self) -> int:
        """Return how many layers change stages, in the whole pipeline."""
        return len(self.moving)

    def describe(self) -> str:
        return notes_to_json(note for note, _ in self._sent.values())

    def agree(self, descriptions: Iterable[str]) -> None:
        """Take the notes of all that ranks will send, if what comes here fits, and lay out the rounds."""
        self._notes = {note.layer: note for text in descriptions for note in notes_from_json(text)}
        for number in self._coming:
            require_fitting(self._notes[number], self._layers[number], self._layer_tensors[number], self._groups)
        self.parcels: list[Parcel] = []
        #: The layer of each parcel, and which of its tensors that is.
        self._travelling: list[tuple[int, int]] = []
        for number, routes in self._routes.items():
            for index, note in enumerate(self._notes[number].tensors if routes else ()):
                turn = self.turn_of(number, note)
                self.parcels.append(Parcel(routes, note.num_bytes, 1, torch.uint8, turn))
                self._travelling.append((number, index))
        self.lay_out(RankRounds.of(self.parcels, self._rank, self._max_bytes))
        self.new_bytes = sum(self._notes[number].num_bytes for number in self._coming)

    def turn_of(self, number: int, tensor: TensorNote) -> int:
        """Return in which turn a tensor of a layer travels: all in one, here."""
        return 0

    def sent_tensor(self, number: int, index: int) -> Tensor:
        """Return one of the tensors of a layer that is sent."""
        return self._sent[number][1][index]

    def make_tensors(self) -> None:
        self._new = {
            number: [note.new(self._device) for note in self._notes[number].tensors] for number in self._coming
        }

    def source_of(self, parcel: int) -> End:
        return End(bytes_of(self.sent_tensor(*self._travelling[parcel])).view(1, -1, 1))

    def target_of(self, parcel: int) -> End:
        number, index = self._travelling[parcel]
        return End(bytes_of(self._new[number][index]).view(1, -1, 1))

    def send_and_receive(self) -> Exception | None:
        if (failure := super().send_and_receive()) is not None:
            return failure
        self._arrived = [
            Arrived(self._notes[number], self._layers[number], self._layer_tensors[number], new)
            for number, new in self._new.items()
        ]
        try:
            for arrived in self._arrived:
                arrived.read_extra_state()
        except ValueError as error:
            return error
        return None

    def commit(self) -> None:
        """Put the new tensors in place, and let the pipeline run the layers; only ``set_extra_state`` could fail."""
        if self.moving:
            self.install()
            self._pipeline.follow(self.boundaries)

    def install(self) -> None:
        """Put the new tensors in place and let go of those sent; only a layer's ``set_extra_state`` could fail.

        The pipeline does not run them yet: see :meth:`Pipeline.follow`.
        """
        for number in self._leaving:
            let_go(self._layer_tensors[number], self._optimizer)
        for arrived in self._arrived:
            arrived.install(self._optimizer)

    def _described(self, number: int) -> tuple[LayerNote, list[Tensor]]:
        layer, tensors = self._layers[number], self._layer_tensors[number]
        return describe(number, layer, tensors, self._optimizer, self._groups, with_room=self.with_room)


class LayerMoveDuringBackward(LayerMove):
    """Carries out this rank's part of a move by a thread of its own, over the pipeline's side group.

    Args:
        num_steps: of the pipeline while it is made.

    Attributes:
        finished: to be entered while the pipeline computes.

    Raises:
        ValueError: for what cannot move; see :func:`~zeroresize.pipeline.move_layers`.
    """

    with_room = True

    def __init__(
        self, pipeline: Pipeline, boundaries: Sequence[int], optimizer: object | None, max_bytes: int, num_steps: int
    ) -> None:
        super().__init__(pipeline, boundaries, optimizer, max_bytes)
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} is not allowed: it is at least 1")
        self.finished = FinishedLayers(pipeline, num_steps, range(self._num_layers, len(self._layers)))
        self.message_device = torch.device("cpu")
        self._versions = {number: list(map(version_of, tensors)) for number, (_, tensors) in self._sent.items()}
        self._was_finished: set[int] = set()
        self._may_begin, self._is_dropped = Event(), False

    @property
    def needed_bytes(self) -> int:
        """Return what the pipeline's own forward and backward take meanwhile, too, where a layer comes."""
        return super().needed_bytes + (bytes_up_to_peak(self._device) if self.new_bytes else 0)

    @property
    def is_outdated(self) -> bool:
        """Return whether something that this rank has sent is another now."""
        return not all(map(self._is_as_sent, self._sent))

    def turn_of(self, number: int, tensor: TensorNote) -> int:
        if tensor.is_constant:
            return 0
        return self._num_layers - number if number < self._num_layers else len(self._layers)

    def sent_tensor(self, number: int, index: int) -> Tensor:
        """Return a tensor of a layer; of what is not constant, once the stage is done with the layer."""
        note, tensors = self._sent[number]
        if not note.tensors[index].is_constant and number not in self._was_finished:
            self.finished.wait(number)
            self._was_finished.add(number)
            note_now, tensors_now = self._described(number)
            if note_now == note:
                for place, tensor_note in enumerate(note.tensors):
                    if not tensor_note.is_constant:
                        tensors[place], self._versions[number][place] = (
                            tensors_now[place],
                            version_of(tensors_now[place]),
                        )
        return tensors[index]

    def connect(self) -> None:
        """Open the side group and start the thread that waits to send, where there is memory for them; collective."""
        self.channel = self._pipeline.open_side_group()
        self.start(self._device, self._may_begin.wait)

    def begin(self) -> None:
        """Let the thread send and receive."""
        self._may_begin.set()

    def drop(self) -> None:
        """End the thread before it has sent anything, and leave the side group."""
        self._is_dropped = True
        self._may_begin.set()
        self._pipeline.leave_side_group()

    def send_and_receive(self) -> Exception | None:
        return None if self._is_dropped else super().send_and_receive()

    def _is_as_sent(self, number: int) -> bool:
        """Whether nothing was written to what was sent, and there is the same memory now, or the same bits."""
        note, tensors = self._described(number)
        note_sent, sent = self._sent[number]
        return (
            note == note_sent
            and list(map(version_of, sent)) == self._versions[number]
            and all(
                tensor.data_ptr() == other.data_ptr() or torch.equal(bytes_of(tensor), bytes_of(other))
                for tensor, other in zip(sent, tensors, strict=True)
            )
        )


class FinishedLayers(LayerWatcher):
    """Watches within a ``with`` block when a stage is done with each layer, and its gradients are final.

    Args:
        num_steps: of the pipeline within the block.
        ties: further numbers, of what is final at the end of the block.
    """

    def __init__(self, pipeline: Pipeline, num_steps: int, ties: Iterable[int]) -> None:
        super().__init__(pipeline.module.watchers)
        self._device, self._steps_left, self._num_microbatches = pipeline.device, num_steps, 0
        self._present, self._counts = pipeline.present, Counter[int]()
        self._open = set(self._present)
        self._finished = {number: Event() for number in (*self._present, *ties)}
        self._on_device: dict[int, torch.cuda.Event] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for number in self._finished:
            self._finish(number)

    def wait(self, number: int) -> None:
        """Wait until this stage is done with a layer; on a GPU its current stream then waits for the device."""
        self._finished[number].wait()
        if number in self._on_device:
            self._on_device[number].wait()

    def step_begins(self, num_microbatches: int) -> None:
        self._steps_left, self._num_microbatches = self._steps_left - 1, num_microbatches
        self._counts.clear()

    def backward_reaches(self, number: int | None) -> None:
        behind = {each for each in self._open if number is None or each > number}
        self._counts.update(behind)
        self._open -= behind
        for each in behind:
            if not self._steps_left and self._counts[each] == self._num_microbatches:
                self._finish(each)
        if number is None:
            self._open = set(self._present)

    def _finish(self, number: int) -> None:
        if self._finished[number].is_set():
            return
        if self._device.type == "cuda":
            self._on_device[number] = torch.cuda.Event()
            self._on_device[number].record(torch.cuda.current_stream(self._device))
        self._finished[number].set()
