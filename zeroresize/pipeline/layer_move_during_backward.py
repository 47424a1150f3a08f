"""One stage's part of a move of layers that is made while the pipeline computes.

Weights and optimizer state stay as they are until the optimizer's step, so they travel first. A layer's gradients, its
buffers and its extra state travel as soon as the stage is done with it, the last layer first: backward comes to it
first. What they are, and whether there are any, is known only then: so they come with a description, and only once the
receiver has told that it can take them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zeroresize.comm.collectives import start_messages
from zeroresize.pipeline.finished_layers import FinishedLayers
from zeroresize.pipeline.layer_contents import (
    LayerNote,
    TensorNote,
    bytes_of,
    describe,
    notes_from_json,
    notes_to_json,
    require_fitting,
)
from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.resharding.agreement import bytes_up_to_peak, wait_for_all
from zeroresize.resharding.byte_streams import ByteStreams
from zeroresize.resharding.parameter_state import GRADIENT, PARAMETER
from zeroresize.resharding.transport import Pair
from zeroresize.utils.torch_private import version_of

_CPU = torch.device("cpu")


class LayerMoveDuringBackward(LayerMove):
    """Carries out this rank's part of a move by a thread of its own, over the pipeline's side group.

    Args:
        boundaries: after the move.
        max_bytes: of messages at once.
        num_steps: of the pipeline while it is made.

    Attributes:
        finished: to be entered while the pipeline computes.
        sent_bytes, received_bytes: by this rank so far.
        num_rounds: in which messages were sent.
        is_outdated: whether something that this rank has sent is another at the end.

    Raises:
        ValueError: for what cannot move; see :func:`~zeroresize.pipeline.move_layers`.
    """

    def __init__(
        self, pipeline: Pipeline, boundaries: Sequence[int], optimizer: object | None, max_bytes: int, num_steps: int
    ) -> None:
        super().__init__(pipeline, boundaries, optimizer, max_bytes)
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} is not allowed: it is at least 1")
        self.finished = FinishedLayers(pipeline, num_steps)
        self.sent_bytes = self.received_bytes = self.num_rounds = 0
        self.is_outdated = False
        self._at_start = {
            number: {(one.name, one.what): _Sent(tensor) for one, tensor in zip(note.tensors, tensors, strict=True)}
            for number, (note, tensors) in self._sent.items()
        }
        self._at_last: dict[int, tuple[LayerNote, list[_Sent]]] = {}
        self._errors: list[Exception] = []
        self._lost: set[int] = set()
        self._may_begin, self._is_dropped = threading.Event(), False
        self._stream: torch.cuda.Stream | None = None
        self._main_stream: torch.cuda.Stream | None = None

    def figures(self, begin: float) -> dict[str, Any]:
        so_far = {"sent_bytes": self.sent_bytes, "received_bytes": self.received_bytes, "num_rounds": self.num_rounds}
        return super().figures(begin) | so_far

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the pipeline's own forward and backward take meanwhile; 0 where no layer comes."""
        return bytes_up_to_peak(self._pipeline.device) if self.new_bytes else 0

    @property
    def messages_on(self) -> torch.device:
        return _CPU

    def streamed(self, tensor: TensorNote) -> bool:
        return tensor.is_constant

    def agree(self, descriptions: Iterable[str] | None) -> None:
        super().agree(descriptions)
        # There may be gradients later that are not there now, as large as their parameters.
        self.new_bytes += sum(
            tensor.num_bytes
            for pair, numbers in self.moving.items()
            for number in (numbers if pair[1] == self._rank else ())
            for tensor in self._notes[number].tensors
            if tensor.what == PARAMETER or not (tensor.is_constant or tensor.what == GRADIENT)
        )

    def connect(self) -> None:
        """Open the side group and start the thread that waits to send; collective.

        Raises:
            RuntimeError: where there is no memory for them, or a rank does not come.
        """
        self._side_group = self._pipeline.open_side_group()
        self._thread = threading.Thread(target=self._run, name="layers that move", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Let the thread send and receive."""
        device = self._pipeline.device
        if device.type == "cuda":
            self._stream, self._main_stream = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            self._stream.wait_stream(self._main_stream)
        self._may_begin.set()

    def drop(self) -> None:
        """End the thread before it has sent anything, and leave the side group."""
        self._is_dropped = True
        self._may_begin.set()
        self._pipeline.leave_side_group()

    def wait(self) -> None:
        """Wait until nothing is sent or received any more. Not before ``finished`` has been left."""
        self._thread.join()

    def join(self) -> Exception | None:
        """Wait as :meth:`wait` does, read what has come, and return the first failure."""
        self.wait()
        if not self._errors:
            self._errors += self.read()
        try:
            self.is_outdated = not self._errors and self._has_changed()
        except Exception as error:
            self._errors.append(error)
        return self._errors[0] if self._errors else None

    def _has_changed(self) -> bool:
        for number in self._sent:
            note, tensors = self._described(number)
            note_then, sent = self._at_last[number]
            if note != note_then or not all(one.is_still(tensor) for one, tensor in zip(sent, tensors, strict=True)):
                return True
        return False

    def _run(self) -> None:
        self._may_begin.wait()
        if self._is_dropped:
            return
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                try:
                    self._carry_out(self.transport, self._tensors())
                except Exception as error:  # the other ranks wait for what follows all the same
                    self._errors.append(error)
                turns = [(number, pair) for pair, numbers in self.moving.items() for number in numbers]
                for number, pair in sorted(turns, reverse=True):
                    if self._rank in pair:
                        self._hand_over(number, pair)
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as error:  # the main thread tells the others
            self._errors.append(error)

    def _hand_over(self, number: int, pair: Pair) -> None:
        """Send or receive what was not sent at first; not to or from a rank with which something has failed."""
        is_sender = pair[0] == self._rank
        peer = pair[is_sender]
        if peer in self._lost:
            return
        try:
            if is_sender:
                self._send_rest(number, pair)
            else:
                self._receive_rest(number, pair)
        except Exception as error:  # the main thread tells the others
            self._lost.add(peer)
            self._errors.append(error)

    def _send_rest(self, number: int, pair: Pair) -> None:
        self.finished.wait(number)
        text, rest = b"", None
        try:
            note, tensors = self._described(number)
            known = self._at_start[number]
            self._at_last[number] = (
                note,
                [
                    known.get((tensor_note.name, tensor_note.what), _Sent(tensor))
                    if tensor_note.is_constant
                    else _Sent(tensor)
                    for tensor_note, tensor in zip(note.tensors, tensors, strict=True)
                ],
            )
            rest = self._rest(
                pair, [tensor for one, tensor in zip(note.tensors, tensors, strict=True) if not one.is_constant]
            )
            text = notes_to_json([note]).encode()
        except Exception as error:  # the receiver must hear of any
            self._errors.append(error)
        self._message(pair, torch.tensor([len(text)], device=_CPU))
        if rest is None or not text:
            return
        self._message(pair, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if int(self._message(pair[::-1], torch.zeros(1, dtype=torch.int64, device=_CPU))):
            self._carry_out(*rest)
        else:
            self._errors.append(RuntimeError(f"layers.{number} cannot go to stage {pair[1]}; its error tells why"))

    def _receive_rest(self, number: int, pair: Pair) -> None:
        size = self._message(pair, torch.zeros(1, dtype=torch.int64, device=_CPU))
        if not int(size):
            self._errors.append(RuntimeError(f"layers.{number} cannot come from stage {pair[0]}; its error tells why"))
            return
        text = self._message(pair, torch.empty(int(size), dtype=torch.uint8, device=_CPU))
        rest = None
        try:
            (note,) = notes_from_json(bytes(text.tolist()).decode())
            new = [one.new(self._pipeline.device) for one in note.tensors if not one.is_constant]
            for tensor in new:
                if self._main_stream is not None and tensor.is_cuda:  # made on this thread's stream, used on the other
                    tensor.record_stream(self._main_stream)
            rest = self._rest(pair, new)
        except Exception as error:  # the sender must hear of any
            self._errors.append(error)
        self._message(pair[::-1], torch.tensor([rest is not None], dtype=torch.int64, device=_CPU))
        if rest is None:
            return
        self._carry_out(*rest)
        try:
            before, after = ([one for one in which.tensors if one.is_constant] for which in (self._notes[number], note))
            if before != after:
                raise ValueError(
                    f"layers.{number} has other parameters or optimizer state than before the block in which it moves: "
                    "the optimizer must step behind the block"
                )
            require_fitting(note, self._layers[number], self._layer_tensors[number], self._groups)
        except ValueError as error:
            self._errors.append(error)
            return
        firsts, rests = iter(self._new[number]), iter(new)
        self._new[number] = [next(firsts if one.is_constant else rests) for one in note.tensors]
        self._notes[number] = note

    def _rest(self, pair: Pair, tensors: Sequence[Tensor]) -> tuple[ByteStreams, dict[Pair, list[Tensor]]]:
        """What :meth:`_carry_out` takes, with the memory of its messages."""
        streams = ByteStreams(
            {pair: sum(tensor.nbytes for tensor in tensors)}, self._pipeline.process_group, self._max_bytes
        )
        streams.allocate(_CPU)
        return streams, {pair: list(map(bytes_of, tensors))}

    def _carry_out(self, streams: ByteStreams, tensors: dict[Pair, list[Tensor]]) -> None:
        errors = streams.carry_out_streams(tensors, self._side_group)
        self.sent_bytes += streams.sent_bytes
        self.received_bytes += streams.received_bytes
        self.num_rounds += streams.num_rounds
        if errors:
            raise errors[0]

    def _message(self, pair: Pair, message: Tensor) -> Tensor:
        """Send it, or receive into it."""
        is_sender = pair[0] == self._rank
        to_peer = {pair[is_sender]: message}
        sends, receives = (to_peer, {}) if is_sender else ({}, to_peer)
        errors = wait_for_all(start_messages(sends, receives, self._pipeline.process_group, self._side_group))
        for error in errors.values():
            raise error
        return message

    def _described(self, number: int) -> tuple[LayerNote, list[Tensor]]:
        return describe(number, self._layers[number], self._layer_tensors[number], self._optimizer, self._groups)


class _Sent:
    """A tensor as it was when it was sent."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)

    def is_still(self, other: Tensor) -> bool:
        """Whether nothing was written to it, and ``other`` is the same memory or has the same bits."""
        if version_of(self._tensor) != self._version:
            return False
        return other.data_ptr() == self._tensor.data_ptr() or torch.equal(bytes_of(other), bytes_of(self._tensor))
