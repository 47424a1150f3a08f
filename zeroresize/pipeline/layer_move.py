"""Each stage has a part in a move of layers: it sends, receives and installs some."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroresize.layers.whole_parameters import require_whole_parameters
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
from zeroresize.pipeline.stage_layers import require_ties_within_stages
from zeroresize.plan.partition import Partition
from zeroresize.resharding.byte_streams import ByteStreams
from zeroresize.resharding.movable_optimizer import groups_of, require_movable_state, settings_of
from zeroresize.resharding.transaction import Transaction
from zeroresize.resharding.transport import Pair
from zeroresize.utils.fingerprint import fingerprint


class LayerMove(Transaction):
    """Moves layers between the stages, as seen by this rank.

    Args:
        boundaries: after the move.
        max_bytes: of messages at once.
        stages: that have layers then, ascending: stage i of ``boundaries`` is ``stages[i]`` of now; None for all.

    Attributes:
        stages: as given.
        moving: the layers that move, by (sender, receiver).
        stream_bytes: of all that moves, by (sender, receiver); known once all ranks have agreed.

    Raises:
        ValueError: for what cannot move; see :func:`~zeroresize.pipeline.move_layers`.
    """

    plan_name = "the boundaries of the stages, before or after, which of them stay, or max_bytes"
    state_name = "the settings of the optimizer's parameter groups"
    memory_name = "new tensors of layers that move"
    transport: ByteStreams

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
        require_whole_parameters(self._layers)
        require_ties_within_stages(self._layers, self.boundaries)
        self._optimizer = require_movable_state(optimizer, dict(pipeline.named_parameters()))
        self._groups = groups_of(self._optimizer)
        self.moving: dict[Pair, list[int]] = {}
        for transfer in Partition(pipeline.boundaries).transfers_to(after, self.stages):
            self.moving.setdefault((transfer.source, transfer.destination), []).append(transfer.layer)
        self._layer_tensors = pipeline.tensors
        self._max_bytes = max_bytes
        self._sent: dict[int, tuple[LayerNote, list[Tensor]]] = {
            number: describe(number, self._layers[number], self._layer_tensors[number], self._optimizer, self._groups)
            for pair, numbers in self.moving.items()
            for number in numbers
            if pair[0] == self._rank
        }
        self.plan = fingerprint(
            json.dumps([type(self).__name__, pipeline.boundaries, self.boundaries, self.stages, max_bytes])
        )
        self.state = fingerprint(json.dumps(settings_of(self._optimizer)))

    @property
    def title(self) -> str:
        return f"a move of layers to boundaries {list(self.boundaries)}"

    @property
    def num_layers(self) -> int:
        """Return how many layers change stages, in the whole pipeline."""
        return sum(map(len, self.moving.values()))

    @property
    def needed_bytes(self) -> int:
        return super().needed_bytes + self.reserved_bytes

    def needs_descriptions(self, states: Sequence[float]) -> bool:
        return True

    def describe(self) -> str:
        return notes_to_json(note for note, _ in self._sent.values())

    def agree(self, descriptions: Iterable[str] | None) -> None:
        """Take the notes of all that ranks will send, and lay out the rounds.

        Raises:
            ValueError: if what will come here does not fit.
        """
        self._notes = {note.layer: note for text in descriptions or () for note in notes_from_json(text)}
        for pair, numbers in self.moving.items():
            for number in numbers if pair[1] == self._rank else ():
                require_fitting(self._notes[number], self._layers[number], self._layer_tensors[number], self._groups)
        self.stream_bytes = {
            pair: sum(note.num_bytes for one in numbers for note in self._notes[one].tensors if self.streamed(note))
            for pair, numbers in self.moving.items()
        }
        self.transport = ByteStreams(self.stream_bytes, self._pipeline.process_group, self._max_bytes)
        self.new_bytes = sum(size for pair, size in self.stream_bytes.items() if pair[1] == self._rank)

    def allocate(self) -> None:
        self.transport.allocate(self.messages_on)
        self._new: dict[int, list[Tensor]] = {
            number: [one.new(self._pipeline.device) for one in self._notes[number].tensors if self.streamed(one)]
            for pair, numbers in self.moving.items()
            if pair[1] == self._rank
            for number in numbers
        }

    def carry_out(self) -> Exception | None:
        errors = self.transport.carry_out_streams(self._tensors())
        if not errors:
            errors += self.read()
        return errors[0] if errors else None

    def read(self) -> list[Exception]:
        """Read the layers that have come, and return what failed; nothing is installed."""
        self._arrived = [
            Arrived(self._notes[number], self._layers[number], self._layer_tensors[number], new)
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
        """Return the bytes that must be free on the device beside the new tensors: none, here."""
        return 0

    @property
    def messages_on(self) -> torch.device:
        """Return the device that messages lie on."""
        return self._pipeline.meet_device

    def streamed(self, tensor: TensorNote) -> bool:
        """Return whether a tensor travels in the streams of the first rounds: all do, here."""
        return True

    def commit(self) -> None:
        """Put the new tensors in place, and let the pipeline run the layers; only ``set_extra_state`` could fail."""
        if self.moving:
            self.install()
            self._pipeline.follow(self.boundaries)

    def install(self) -> None:
        """Put the new tensors in place and let go of those sent; only a layer's ``set_extra_state`` could fail.

        The pipeline does not run them yet: see :meth:`Pipeline.follow`.
        """
        for number in self._sent:
            let_go(self._layer_tensors[number], self._optimizer)
        for arrived in self._arrived:
            arrived.install(self._optimizer)

    def _sent_of(self, number: int) -> list[Tensor]:
        note, tensors = self._sent[number]
        return [tensor for one, tensor in zip(note.tensors, tensors, strict=True) if self.streamed(one)]

    def _tensors(self) -> dict[Pair, list[Tensor]]:
        """[bytes] of this rank's streams, one after another."""
        tensors_by_pair: dict[Pair, list[Tensor]] = {}
        for pair, numbers in self.moving.items():
            if self._rank in pair:
                tensors = [self._sent_of(one) if pair[0] == self._rank else self._new[one] for one in numbers]
                tensors_by_pair[pair] = [bytes_of(tensor) for of_layer in tensors for tensor in of_layer]
        return tensors_by_pair
