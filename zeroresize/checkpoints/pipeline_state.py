"""A pipeline for torch.distributed.checkpoint (DCP): what some stages wrote, others read, however many there are.

A file names everything as the whole model does, so it knows no stages:

- ``layers.7.weight`` is a parameter or persistent buffer of layer 7, as in the model's ``state_dict``;
- ``optimizer.layers.7.weight.exp_avg`` is the state of a parameter;
- ``pipeline.layers.7.…`` is what only a pipeline reads: a note of the layer's tensors with their shapes, so a layer
  whose parameters have changed shape since it was built (as by pruning) is read as it was written; buffers that are not
  persistent, and extra state;
- ``pipeline.settings`` are the number of the format, the optimizer's groups, and how many layers there are.

As when a layer moves, parameters come with whether they require gradients, and in the shapes and dtypes in which they
were written; modules and their modes stay as they are where they are read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from zeroresize.checkpoints.checksums import CHECKSUMS, Checksums
from zeroresize.checkpoints.divided_tensor import ChecksumsEntry, DividedTensor
from zeroresize.checkpoints.reader import PIPELINE_SETTINGS, CheckpointReader
from zeroresize.pipeline.layer_contents import (
    BUFFER,
    EXTRA,
    Arrived,
    LayerNote,
    TensorNote,
    describe,
    notes_from_json,
    notes_to_json,
    require_fitting,
)
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import LayerTensors
from zeroresize.resharding.parameter_state import (
    GRADIENT,
    PARAMETER,
    STATE,
    groups_of,
    require_movable_state,
    settings_of,
)
from zeroresize.utils.codec import FORMAT, require_format

#: DCP loads them in the order of their names: the last one when the others are done.
_SECTIONS = ("layers", "optimizer", "pipeline")


def pipeline_state(pipeline: Pipeline, optimizer: Any) -> dict[str, Any]:
    """Return what this rank writes of a pipeline between two steps, and reads into it; see the module.

    Which tensors a layer has in a file, and in which shapes, its note says. So a pipeline reads by itself, once DCP has
    planned to read its settings (:class:`~zeroresize.checkpoints.reader.ReadsItself`); what it has read is
    installed when all ranks have read.
    """
    pipeline.meet()  # raises on a rank that was released
    pipeline.require_same_parameters()
    state = _PipelineState(pipeline, require_movable_state(optimizer, dict(pipeline.named_parameters())))
    sections = {name: _Section(state, name) for name in _SECTIONS if name != "optimizer" or optimizer is not None}
    return {**sections, CHECKSUMS: ChecksumsEntry(state.checksums)}


class _PipelineState:
    """One pipeline's state, which DCP sees as sections of names.

    Attributes:
        read: what was read and is not yet installed.
        checksums: of what was given to write.
    """

    def __init__(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
        self._pipeline, self._optimizer = pipeline, optimizer
        self.read: _Read | None = None
        self.checksums = Checksums()
        self.tensors()  # an error is raised now

    def __deepcopy__(self, memo: Any) -> _PipelineState:
        """Asynchronous checkpoints copy the tensors, and whatever hangs on them."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return what this rank writes, by the names of the file, without copies."""
        pipeline, inner, groups = self._pipeline, self._optimizer, groups_of(self._optimizer)
        settings = {
            "format": FORMAT,
            "num_layers": len(pipeline.layers),
            "groups": settings_of(inner),
            "members": _members(pipeline, inner),
        }
        tensors = {PIPELINE_SETTINGS: _as_bytes(json.dumps(settings))}
        for number in pipeline.present:
            layer = pipeline.layers[number]
            note, contents = describe(number, layer, pipeline.tensors[number], inner, groups)
            persistent = layer.state_dict(keep_vars=True)
            kept = [
                (_for_any_device(tensor_note), tensor)
                for tensor_note, tensor in zip(note.tensors, contents, strict=True)
                if tensor_note.what != GRADIENT
            ]
            note = replace(note, tensors=tuple(tensor_note for tensor_note, _ in kept))
            tensors[_note_of(number)] = _as_bytes(notes_to_json([note]))
            tensors |= {
                _key(number, tensor_note, tensor_note.name in persistent): tensor for tensor_note, tensor in kept
            }
            # Tied parameters and shared buffers, which the note does not have, by all their names.
            others = {f"layers.{number}.{name}": one for name, one in persistent.items() if isinstance(one, Tensor)}
            tensors |= {name: one.detach() for name, one in others.items() if name not in tensors}
        return tensors

    def read_from(self, folder: str | os.PathLike[str]) -> None:
        """Read this rank's layers from a checkpoint."""
        self.read = _Read(CheckpointReader(folder), self._pipeline, self._optimizer)

    def install(self) -> None:
        """Make what was read this rank's."""
        if self.read is None:
            raise ValueError(
                "nothing of the pipeline was read, since only zr.CheckpointReader can: "
                "dcp.load(zr.sharded_state_dict(pipeline, optimizer), storage_reader=zr.CheckpointReader(folder), "
                "process_group=pipeline.process_group)"
            )
        self.read.install()
        self.read = None
        self._pipeline.refresh()


class _Section:
    """A Stateful of DCP: the names of a file that begin with ``name``."""

    def __init__(self, state: _PipelineState, name: str) -> None:
        self._state, self._prefix = state, f"{name}."

    def state_dict(self) -> dict[str, Tensor]:
        deferred: dict[str, Tensor] = {}
        for name, tensor in self._state.tensors().items():
            if name.startswith(self._prefix):
                kind = _ReadsAll if name == PIPELINE_SETTINGS else _Deferred
                made = deferred[name.removeprefix(self._prefix)] = kind(name, tensor, None, self._state.checksums)
                if isinstance(made, _ReadsAll):
                    made._state = self._state
        return deferred

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._prefix == f"{_SECTIONS[-1]}.":  # once, for all of them
            self._state.install()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("what zeroresize.sharded_state_dict returns is for torch.distributed.checkpoint only")


class _AnySize(list[int]):
    """A size that DCP takes for that of any tensor in a file; as no tuple, it is asked itself whether it differs."""

    def __ne__(self, other: object) -> bool:
        return False


class _Deferred(DividedTensor):
    """A tensor that DCP writes as any other one and plans to read nothing into."""

    def size(self, dim: int | None = None) -> Any:
        return _AnySize(self.shape) if dim is None else self.shape[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return []


class _ReadsAll(_Deferred):
    """The settings, with which DCP has all of the pipeline's layers read."""

    _state: _PipelineState

    def read_itself(self, folder: str | os.PathLike[str]) -> None:
        self._state.read_from(folder)


class _Read:
    """What this rank has read, not yet installed."""

    def __init__(self, reader: Any, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
        self._reader, self._pipeline, self._optimizer = reader, pipeline, optimizer
        self._sizes = {
            name: metadata.size
            for name, metadata in reader.read_metadata().state_dict_metadata.items()
            if isinstance(metadata, TensorStorageMetadata)
        }
        settings = self._texts([PIPELINE_SETTINGS])[PIPELINE_SETTINGS]
        self._settings: dict[str, Any] = json.loads(settings)
        require_format(self._settings.get("format"), PIPELINE_SETTINGS)
        self._require_same_model()
        self._arrived: list[Arrived] = []
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._read_layers()

    def install(self) -> None:
        """Make it this rank's."""
        for arrived in self._arrived:
            arrived.install(self._optimizer)
        with torch.no_grad():
            for buffer, new in self._shared:
                buffer.copy_(new)
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        for group, saved in zip(groups, self._settings["groups"] if groups else (), strict=True):
            _update(group, saved)

    def _require_same_model(self) -> None:
        num_layers, here = self._settings["num_layers"], len(self._pipeline.layers)
        if num_layers != here:
            raise ValueError(f"the checkpoint is of {num_layers} layers, and the pipeline has {here}")
        if self._optimizer is None:
            return
        members = _members(self._pipeline, self._optimizer)
        if members != self._settings["members"]:
            raise ValueError(
                "the optimizer has other parameters, or other groups of them, than when the checkpoint was written: "
                f"{list(map(len, members))} parameters in its groups here, {list(map(len, self._settings['members']))} "
                "there"
            )

    def _read_layers(self) -> None:
        pipeline, groups = self._pipeline, groups_of(self._optimizer)
        reading = [(number, pipeline.layers[number], pipeline.tensors[number]) for number in pipeline.present]
        for tie, holders in pipeline.shared:  # a file has its state with the first layer, which may be elsewhere
            if pipeline.stage in holders[1:]:
                reading.append((tie.layers[0], nn.Module(), tie.tensors))
        texts = self._texts(sorted({_note_of(number) for number, *_ in reading}))
        wanted: dict[str, Tensor] = {}
        installing: list[tuple[LayerNote, nn.Module, LayerTensors, list[Tensor]]] = []
        for number, layer, layer_tensors in reading:
            (note,) = notes_from_json(texts[_note_of(number)])
            if number not in pipeline.present:
                note = note.of_parameters(layer_tensors.parameters)
            if self._optimizer is None:
                notes = tuple(one for one in note.tensors if not one.what.startswith(STATE))
                bare = {name: replace(one, group=None, state={}) for name, one in note.parameters.items()}
                note = replace(note, tensors=notes, parameters=bare)
            note = replace(note, training=tuple(one.training for one in layer.modules()))
            require_fitting(note, layer, layer_tensors, groups)
            new = [one.new(pipeline.device) for one in note.tensors]
            keys = [self._key_of(number, one) for one in note.tensors]
            wanted |= dict(zip(keys, new, strict=True))
            installing.append((note, layer, layer_tensors, new))
            shared = self._shared_buffers(number, layer)
            wanted |= {key: fresh for key, (_, fresh) in shared.items()}
            self._shared += shared.values()
        self._load(wanted)
        for note, layer, layer_tensors, new in installing:
            arrived = Arrived(note, layer, layer_tensors, new)
            arrived.read_extra_state()
            self._arrived.append(arrived)

    def _shared_buffers(self, number: int, layer: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """Persistent buffers that several layers share: each with memory for what is read."""
        layer_buffers = self._pipeline.tensors[number].buffers
        shared = {}
        persistent = layer.state_dict(keep_vars=True)
        for name, buffer in layer.named_buffers():
            key = f"layers.{number}.{name}"
            if name in persistent and name not in layer_buffers and key in self._sizes:
                shared[key] = (buffer, torch.empty_like(buffer))
        return shared

    def _key_of(self, number: int, note: TensorNote) -> str:
        """Whatever was persistent where it was written."""
        persistent = _key(number, note, is_persistent=True)
        return persistent if persistent in self._sizes else _key(number, note, is_persistent=False)

    def _texts(self, names: list[str]) -> dict[str, str]:
        data: dict[str, Tensor] = {}
        for name in names:
            if name not in self._sizes:
                raise ValueError(f"the checkpoint has no {name}")
            data[name] = torch.empty(self._sizes[name], dtype=torch.uint8)
        self._load(data)
        return {name: bytes(one.tolist()).decode() for name, one in data.items()}

    def _load(self, tensors: dict[str, Tensor]) -> None:
        """Read into these tensors, this rank alone."""
        different = [name for name, one in tensors.items() if self._sizes.get(name) != one.shape]
        if different:
            raise ValueError(f"the checkpoint lacks {different[0]}, or has it in another shape")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is meant
            if tensors:
                dcp.load(tensors, storage_reader=self._reader, no_dist=True)


def _members(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> list[list[str | None]]:
    """The names of the parameters in each of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in pipeline.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in groups]


def _note_of(number: int) -> str:
    return f"pipeline.layers.{number}"


def _key(number: int, note: TensorNote, is_persistent: bool) -> str:
    name = f"layers.{number}.{note.name}"
    if note.what.startswith(STATE):
        return f"optimizer.{name}.{note.what.removeprefix(STATE)}"
    if note.what == PARAMETER or (note.what == BUFFER and is_persistent):
        return name
    return f"pipeline.{name}".rstrip(".") + f".{note.what}"


def _for_any_device(note: TensorNote) -> TensorNote:
    """The note of a tensor that may be read on another kind of device: only steps and extra state stay on the CPU."""
    is_step = note.what.startswith(STATE) and not note.shape
    return replace(note, is_on_cpu=note.is_on_cpu and (is_step or note.what == EXTRA))


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _update(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Numbers go where they were, a tensor or not; what is no plain value stays as it is here."""
    for key, value in saved.items():
        known = group.get(key)
        if isinstance(known, Tensor):
            known.fill_(value) if not isinstance(value, list) else known.copy_(torch.tensor(value))
        elif isinstance(known, tuple):
            group[key] = tuple(value)
        elif isinstance(known, bool | int | float | str | None):
            group[key] = value
