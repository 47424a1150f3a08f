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
from zeroresize.resharding.parameter_state import groups_of, require_movable_state, settings_of
from zeroresize.resharding.parcels import End, Parcel, RankRounds
from zeroresize.resharding.transaction import Transaction
from zeroresize.utils.hashing import fingerprint


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
        self._layers, self._layer_tensors = list(pipeline.layers), pipeline.tensors
        if max_bytes < 2:
            raise ValueError(f"max_bytes={max_bytes} is too small: it must be at least 2")
        self.stages = tuple(range(pipeline.num_stages)) if stages is None else tuple(stages)
        after = Partition.of(boundaries, len(self._layers), len(self.stages))
        self.boundaries = after.boundaries
        self.title = f"a move of layers to boundaries {list(self.boundaries)}"
        require_whole_parameters(self._layers)
        require_ties_within_stages(self._layers, self.boundaries)
        self._optimizer = require_movable_state(optimizer, dict(pipeline.named_parameters()))
        self._groups = groups_of(self._optimizer)
        self.moving = Partition(pipeline.boundaries).transfers_to(after, self.stages)
        self._sent: dict[int, tuple[LayerNote, list[Tensor]]] = {
            transfer.layer: self._described(transfer.layer) for transfer in self.moving if transfer.source == self._rank
        }
        self._coming = [transfer.layer for transfer in self.moving if transfer.destination == self._rank]
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
        for number, source, destination in self.moving:
            for index, note in enumerate(self._notes[number].tensors):
                turn = self.turn_of(number, note)
                self.parcels.append(Parcel(((source, destination),), note.num_bytes, 1, torch.uint8, turn))
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
        for arrived in self._arrived:
            arrived.read_extra_state(is_from_file=False)
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
        for number in self._sent:
            let_go(self._layer_tensors[number], self._optimizer)
        for arrived in self._arrived:
            arrived.install(self._optimizer)

    def _described(self, number: int) -> tuple[LayerNote, list[Tensor]]:
        layer, tensors = self._layers[number], self._layer_tensors[number]
        return describe(number, layer, tensors, self._optimizer, self._groups, with_room=self.with_room)
