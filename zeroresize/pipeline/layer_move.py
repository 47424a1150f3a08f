"""One stage's part of a move of layers: what it sends, receives and installs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
from zeroresize.pipeline.stage_layers import require_plain, require_ties_within_stages
from zeroresize.plan.partition import Partition
from zeroresize.resharding.agreement import fingerprint
from zeroresize.resharding.byte_streams import ByteStreams
from zeroresize.resharding.movable_optimizer import groups_of, require_movable_state, settings_of
from zeroresize.resharding.transport import Pair


class LayerMove:
    """A move on this rank, from the plan to the installed layers.

    Args:
        boundaries: after the move.
        max_bytes: of messages at once.
        stages: that have layers then, ascending: stage i of ``boundaries`` is ``stages[i]`` of now; None for all.

    Attributes:
        stages: as given.
        moving: the layers that move, by (sender, receiver).
        streams: of all that travels, once all have agreed.
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
        self.plan = fingerprint(
            json.dumps([type(self).__name__, pipeline.boundaries, self.boundaries, self.stages, max_bytes])
        )
        self.settings = fingerprint(json.dumps(settings_of(self._optimizer)))

    def told(self) -> str:
        """What this rank will send, for the others."""
        return notes_to_json(note for note, _ in self._sent.values())

    def agree(self, told: Iterable[str]) -> None:
        """Take what all ranks have told, and lay out the rounds.

        Raises:
            ValueError: if what will come here does not fit.
        """
        self._notes = {note.layer: note for text in told for note in notes_from_json(text)}
        for pair, numbers in self.moving.items():
            for number in numbers if pair[1] == self._rank else ():
                require_fitting(self._notes[number], self._layers[number], self._own[number], self._groups)
        self.stream_bytes = {
            pair: sum(note.num_bytes for one in numbers for note in self._notes[one].tensors if self.streamed(note))
            for pair, numbers in self.moving.items()
        }
        self.streams = ByteStreams(self.stream_bytes, self._pipeline.process_group, self._max_bytes)
        self.new_bytes = sum(size for pair, size in self.stream_bytes.items() if pair[1] == self._rank)

    def allocate(self) -> None:
        """Make the new tensors and the memory of messages."""
        self.streams.allocate(self.messages_on)
        self._new: dict[int, list[Tensor]] = {
            number: [one.new(self._pipeline.device) for one in self._notes[number].tensors if self.streamed(one)]
            for pair, numbers in self.moving.items()
            if pair[1] == self._rank
            for number in numbers
        }

    def carry_out(self) -> Exception | None:
        """Send and receive the messages of all rounds; returns the first failure.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.
        """
        errors = self.streams.carry_out_streams(self._tensors())
        if not errors:
            errors += self.read()
        if self._pipeline.device.type == "cuda":  # a wait only orders streams: nothing has been received before this
            torch.cuda.synchronize(self._pipeline.device)
        return errors[0] if errors else None

    def read(self) -> list[Exception]:
        """Look through what has come; returns what failed."""
        self._arrived = [
            Arrived(self._notes[number], self._layers[number], self._own[number], new)
            for number, new in self._new.items()
        ]
        try:
            for arrived in self._arrived:
                arrived.read_extra_state(is_from_file=False)
        except Exception as error:
            return [error]
        return []

    @property
    def reserved_bytes(self) -> int:
        """What must be free on the device beside the new tensors: nothing, here."""
        return 0

    @property
    def messages_on(self) -> torch.device:
        """Where messages lie."""
        return self._pipeline.meet_device

    def streamed(self, tensor: TensorNote) -> bool:
        """Whether it is in the streams: all are, here."""
        return True

    def install(self) -> None:
        """Put the new tensors in place and let go of those sent; only a layer's ``set_extra_state`` could fail.

        The pipeline does not run them yet: see :meth:`Pipeline.follow`.
        """
        for number in self._sent:
            let_go(self._own[number], self._optimizer)
        for arrived in self._arrived:
            arrived.install(self._optimizer)

    def _sent_of(self, number: int) -> list[Tensor]:
        note, tensors = self._sent[number]
        return [tensor for one, tensor in zip(note.tensors, tensors, strict=True) if self.streamed(one)]

    def _tensors(self) -> dict[Pair, list[Tensor]]:
        """[bytes] of this rank's streams, one after another."""
        found: dict[Pair, list[Tensor]] = {}
        for pair, numbers in self.moving.items():
            if self._rank in pair:
                tensors = [self._sent_of(one) if pair[0] == self._rank else self._new[one] for one in numbers]
                found[pair] = [bytes_of(tensor) for of_layer in tensors for tensor in of_layer]
        return found
