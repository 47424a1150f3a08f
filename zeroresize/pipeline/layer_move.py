"""One stage's part of a move of layers: what it sends, receives and installs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroresize.pipeline.byte_rounds import Pair, Round, pieces_of, rounds_of
from zeroresize.pipeline.layer_contents import (
    Arrived,
    LayerNote,
    as_json,
    bytes_of,
    describe,
    from_json,
    groups_of,
    let_go,
    require_fitting,
    require_movable_state,
    settings_of,
)
from zeroresize.pipeline.partition import Partition
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import require_plain, require_ties_within_stages
from zeroresize.resharding.agreement import fingerprint
from zeroresize.resharding.message_rounds import MessageRounds


class LayerMove:
    """A move on this rank, from the plan to the installed layers.

    Args:
        boundaries: after the move.
        max_bytes: of messages at once.
        stages: that have layers then, ascending: stage i of ``boundaries`` is ``stages[i]`` of now; None for all.

    Attributes:
        stages: as given.
        moving: the layers that move, by (sender, receiver).
        stream_bytes: of all that moves, by (sender, receiver); known once all ranks have agreed.
        plan: a fingerprint of what must be alike on all ranks.
        settings: a fingerprint of the settings of the optimizer's parameter groups.

    Raises:
        ValueError: for what cannot move; see :func:`~zeroresize.pipeline.move_layers`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        boundaries: Sequence[int],
        optimizer: object | None,
        max_bytes: int,
        stages: Sequence[int] | None = None,
    ) -> None:
        self._pipeline, self._rank = pipeline, pipeline.stage
        self._layers = list(pipeline.layers)
        if max_bytes < 2:
            raise ValueError(f"max_bytes={max_bytes} is too small: it must be at least 2")
        self.stages = tuple(range(pipeline.num_stages)) if stages is None else tuple(stages)
        after = Partition.of(boundaries, len(self._layers), len(self.stages))
        self.boundaries = after.boundaries
        require_plain(self._layers)
        require_ties_within_stages(self._layers, self.boundaries)
        self._optimizer = require_movable_state(optimizer)
        self._groups = groups_of(self._optimizer)
        self.moving: dict[Pair, list[int]] = {}
        for transfer in Partition(pipeline.boundaries).transfers_to(after, self.stages):
            self.moving.setdefault((transfer.source, transfer.destination), []).append(transfer.layer)
        self._own = pipeline.tensors
        self._max_bytes = max_bytes
        self._sent: dict[int, tuple[LayerNote, list[Tensor]]] = {
            number: describe(number, self._layers[number], self._own[number], self._optimizer, self._groups)
            for pair, numbers in self.moving.items()
            for number in numbers
            if pair[0] == self._rank
        }
        self.plan = fingerprint(json.dumps([pipeline.boundaries, self.boundaries, self.stages, max_bytes]))
        self.settings = fingerprint(json.dumps(settings_of(self._optimizer)))
        self.sent_bytes = self.received_bytes = 0

    def told(self) -> str:
        """What this rank will send, for the others."""
        return as_json(note for note, _ in self._sent.values())

    def agree(self, told: Sequence[str]) -> None:
        """Take what all ranks have told, and lay out the rounds.

        Raises:
            ValueError: if what will come here does not fit.
        """
        self._notes = {note.layer: note for text in told for note in from_json(text)}
        for pair, numbers in self.moving.items():
            for number in numbers if pair[1] == self._rank else ():
                require_fitting(self._notes[number], self._layers[number], self._own[number], self._groups)
        self.stream_bytes = {
            pair: sum(self._notes[one].num_bytes for one in numbers) for pair, numbers in self.moving.items()
        }
        # Two rounds at once: while one travels, the next is packed.
        self.rounds = rounds_of(self.stream_bytes, self._max_bytes // 2)
        largest = max((sum(self._sizes(one).values()) for one in self.rounds), default=0)
        self._num_buffers = min(2, len(self.rounds))
        self.buffer_bytes = self._num_buffers * largest
        self.new_bytes = sum(size for pair, size in self.stream_bytes.items() if pair[1] == self._rank)

    def allocate(self) -> None:
        """Make the new tensors and the memory of messages."""
        size, where = self.buffer_bytes // max(self._num_buffers, 1), self._pipeline.meet_device
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=where) for _ in range(self._num_buffers)]
        self._new: dict[int, list[Tensor]] = {
            number: [one.new(self._pipeline.device) for one in self._notes[number].tensors]
            for pair, numbers in self.moving.items()
            if pair[1] == self._rank
            for number in numbers
        }
        self._arrived = [
            Arrived(self._notes[number], self._layers[number], self._own[number], new)
            for number, new in self._new.items()
        ]
        self._streams: dict[Pair, list[Tensor]] = {}  # [bytes] of all tensors, one after another
        for pair, numbers in self.moving.items():
            if self._rank in pair:
                tensors = [self._sent[one][1] if pair[0] == self._rank else self._new[one] for one in numbers]
                self._streams[pair] = [bytes_of(tensor) for of_layer in tensors for tensor in of_layer]

    def carry_out(self) -> Exception | None:
        """Send and receive the messages of all rounds; returns the first failure.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.
        """
        rounds = MessageRounds(self._pipeline.process_group, self._copy, self._copy)
        errors = rounds.carry_out(self.rounds, self._buffers, self._messages_of)
        self.sent_bytes, self.received_bytes = rounds.sent_bytes, rounds.received_bytes
        try:
            for arrived in self._arrived if not errors else ():
                arrived.unpickle()
        except Exception as error:
            errors.append(error)
        if self._pipeline.device.type == "cuda":  # a wait only orders streams: nothing has been received before this
            torch.cuda.synchronize(self._pipeline.device)
        return errors[0] if errors else None

    def install(self) -> None:
        """Put the new tensors in place and let go of those sent; only a layer's ``set_extra_state`` could fail.

        The pipeline does not run them yet: see :meth:`Pipeline.follow`.
        """
        for number in self._sent:
            let_go(self._own[number], self._optimizer)
        for arrived in self._arrived:
            arrived.install(self._optimizer)

    def _copy(self, message: Tensor, round_: Round, pair: Pair) -> None:
        """Between a message [bytes] and the tensors: into it where this rank sends it, else out of it."""
        tensors, done = self._streams[pair], 0
        for number, begin, end in pieces_of([one.numel() for one in tensors], *round_[pair]):
            part, of_message = tensors[number][begin:end], message[done : done + end - begin]
            done += end - begin
            target, source = (of_message, part) if pair[0] == self._rank else (part, of_message)
            target.copy_(source)

    def _messages_of(self, round_: Round, buffer: Tensor) -> dict[Pair, Tensor]:
        """Where this rank's messages of a round lie."""
        messages, begin = {}, 0
        for pair, size in self._sizes(round_).items():
            messages[pair] = buffer[begin : begin + size]
            begin += size
        return messages

    def _sizes(self, round_: Round) -> dict[Pair, int]:
        """Bytes of this rank's messages in a round."""
        return {pair: end - begin for pair, (begin, end) in round_.items() if self._rank in pair}
