"""One stage's part of a move of layers that is made while the pipeline computes.

Weights and optimizer state stay as they are until the optimizer's step, so they travel first. A layer's gradients, its
buffers and its extra state travel as soon as the stage is done with it, the last layer first: backward comes to it
first. There is room for every gradient that may come. Whatever is another at the end than it was when it was sent, or
does not fit into its room, makes the move outdated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from zeroresize.pipeline.layer_contents import TensorNote, bytes_of
from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import LayerWatcher
from zeroresize.resharding.agreement import bytes_up_to_peak
from zeroresize.utils.torch_private import version_of


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
        self.finished = FinishedLayers(pipeline, num_steps)
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
        return 0 if tensor.is_constant else len(self._layers) - number

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
    """

    def __init__(self, pipeline: Pipeline, num_steps: int) -> None:
        super().__init__(pipeline.module.watchers)
        self._device, self._steps_left, self._num_microbatches = pipeline.device, num_steps, 0
        self._open, self._counts = set(pipeline.present), Counter[int]()
        self._finished = {number: Event() for number in pipeline.present}
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
            self._open = set(self._finished)

    def _finish(self, number: int) -> None:
        if self._finished[number].is_set():
            return
        if self._device.type == "cuda":
            self._on_device[number] = torch.cuda.Event()
            self._on_device[number].record(torch.cuda.current_stream(self._device))
        self._finished[number].set()
