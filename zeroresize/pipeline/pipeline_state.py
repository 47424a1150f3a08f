"""A pipeline for torch.distributed.checkpoint (DCP): what some stages wrote, others read, however many there are.

A file names everything as the whole model does, so it knows no stages:

- ``layers.7.weight`` is a parameter or persistent buffer of layer 7, as in the model's ``state_dict``;
- ``optimizer.layers.7.weight.exp_avg`` is the state of a parameter;
- ``pipeline.layers.7.…`` is what only a pipeline reads: a note of the layer's tensors with their shapes, so a layer
  whose parameters have changed shape since it was built (as by pruning) is read as it was written; buffers that are not
  persistent, and extra state;
- ``pipeline.settings`` are the optimizer's groups and what a balancer has learned.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
from zeroresize.pipeline.pipeline_balancer import PipelineBalancer
from zeroresize.resharding.agreement import meet_prepared
from zeroresize.resharding.movable_optimizer import groups_of, require_movable_state, settings_of
from zeroresize.resharding.parameter_state import GRADIENT, PARAMETER, STATE
from zeroresize.utils.checkpoint_reader import CheckpointReader

_SETTINGS = "pipeline.settings"


def pipeline_state(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None = None, *, balancer: PipelineBalancer | None = None
) -> dict[str, Tensor]:
    """What this rank writes of a pipeline between two steps; not collective, and without copies::

        dcp.save(pipeline_state(pipeline, optimizer), checkpoint_id=folder, process_group=pipeline.process_group)

    The group must be given: after a re-packing the job's default one has members that are gone. Gradients are not
    written.

    Raises:
        ValueError: for an optimizer that is a wrapper or ZeRO, or whose state is of other kinds than tensors, numbers
            and texts.
        RuntimeError: on a rank that was released.
    """
    pipeline.meet()
    inner, groups = require_movable_state(optimizer), groups_of(optimizer)
    names = {id(one): name for name, one in pipeline.named_parameters()}
    members = [[names.get(id(one)) for one in group["params"]] for group in (inner.param_groups if inner else ())]
    settings = {
        "num_layers": len(pipeline.layers),
        "groups": settings_of(inner),
        "members": members,
        "balancer": None if balancer is None else balancer.state_dict(),
    }
    found = {_SETTINGS: _as_bytes(json.dumps(settings))}
    for number in pipeline.present:
        layer = pipeline.layers[number]
        note, tensors = describe(number, layer, pipeline.tensors[number], inner, groups)
        persistent = layer.state_dict(keep_vars=True)
        kept = [
            (_for_any_device(one), tensor)
            for one, tensor in zip(note.tensors, tensors, strict=True)
            if one.what != GRADIENT
        ]
        note = replace(note, tensors=tuple(one for one, _ in kept))
        found[_note_of(number)] = _as_bytes(notes_to_json([note]))
        found |= {_key(number, one, one.name in persistent): tensor for one, tensor in kept}
        # Tied parameters and shared buffers, which the note does not have, by all their names.
        others = {f"layers.{number}.{name}": one for name, one in persistent.items() if isinstance(one, Tensor)}
        found |= {name: one.detach() for name, one in others.items() if name not in found}
    return found


def load_pipeline(
    checkpoint: str | os.PathLike[str] | dcp.StorageReader,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    balancer: PipelineBalancer | None = None,
) -> None:
    """Go on from what :func:`pipeline_state` wrote, on any number of stages; collective over the pipeline's ranks.

    Each rank reads its own layers. All or nothing: nobody changes anything before all have read. As when a layer moves,
    parameters come with whether they require gradients, and in the shapes and dtypes in which they were written;
    modules and their modes stay as they are here.

    Args:
        checkpoint: a folder, of which no code runs; or what reads another storage, as it does.
        optimizer: with all of ``pipeline.parameters()``, in the same groups as when it was written; whose state and
            settings, such as learning rates, are taken over. None leaves them.
        balancer: which goes on with what was learned, if that was written, too.

    Raises:
        ValueError: if something is missing, does not fit, or could run code, naming it; the other ranks raise a
            RuntimeError. Classes of extra state are allowed by ``torch.serialization.add_safe_globals``.
        RuntimeError: on every rank that lives, if one cannot read or does not come. Nothing has changed then.
    """
    meet = pipeline.meet()
    read: _Read | Exception
    try:
        reader = checkpoint if isinstance(checkpoint, dcp.StorageReader) else CheckpointReader(checkpoint)
        read = _Read(reader, pipeline, require_movable_state(optimizer))
    except Exception as error:  # the others must hear of any
        read = error
    meet_prepared(meet, read if isinstance(read, Exception) else (0.0, 0.0))
    assert isinstance(read, _Read)
    if balancer is not None and read.balancer_state is not None:
        balancer.load_state_dict(read.balancer_state)  # the same everywhere, so it fails on all ranks or on none
    read.install()
    pipeline.refresh()


class _Read:
    """What this rank has read, not yet installed.

    Attributes:
        balancer_state: None where there is none.
    """

    def __init__(self, reader: Any, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
        self._reader, self._pipeline, self._optimizer = reader, pipeline, optimizer
        self._sizes = {
            name: one.size
            for name, one in reader.read_metadata().state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        if _SETTINGS not in self._sizes:
            raise ValueError("the checkpoint was not written by pipeline_state: it has no pipeline.settings")
        settings = self._texts([_SETTINGS])[_SETTINGS]
        self._settings: dict[str, Any] = json.loads(settings)
        self.balancer_state: dict[str, Any] | None = self._settings["balancer"]
        self._require_same_model()
        self._arrived: list[Arrived] = []
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._read_layers()

    def install(self) -> None:
        """Make it this rank's."""
        for one in self._arrived:
            one.install(self._optimizer)
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
        names = {id(one): name for name, one in self._pipeline.named_parameters()}
        members = [[names.get(id(one)) for one in group["params"]] for group in self._optimizer.param_groups]
        if members != self._settings["members"]:
            raise ValueError(
                "the optimizer has other parameters, or other groups of them, than when the checkpoint was written: "
                f"{list(map(len, members))} parameters in its groups here, {list(map(len, self._settings['members']))} "
                "there"
            )

    def _read_layers(self) -> None:
        pipeline, groups = self._pipeline, groups_of(self._optimizer)
        texts = self._texts([_note_of(number) for number in pipeline.present])
        wanted: dict[str, Tensor] = {}
        installing: list[tuple[LayerNote, list[Tensor]]] = []
        for number in pipeline.present:
            layer, own = pipeline.layers[number], pipeline.tensors[number]
            (note,) = notes_from_json(texts[_note_of(number)])
            if self._optimizer is None:
                notes = tuple(one for one in note.tensors if not one.what.startswith(STATE))
                bare = {name: replace(one, group=None, state=None) for name, one in note.parameters.items()}
                note = replace(note, tensors=notes, parameters=bare)
            note = replace(note, training=tuple(one.training for one in layer.modules()))
            require_fitting(note, layer, own, groups)
            new = [one.new(pipeline.device) for one in note.tensors]
            keys = [self._key_of(number, one) for one in note.tensors]
            wanted |= dict(zip(keys, new, strict=True))
            installing.append((note, new))
            shared = self._shared_buffers(number, layer)
            wanted |= {key: fresh for key, (_, fresh) in shared.items()}
            self._shared += shared.values()
        self._load(wanted)
        for note, new in installing:
            arrived = Arrived(note, pipeline.layers[note.layer], pipeline.tensors[note.layer], new)
            arrived.read_extra_state(is_from_file=True)
            self._arrived.append(arrived)

    def _shared_buffers(self, number: int, layer: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """Persistent buffers that several layers share: each with memory for what is read."""
        own = self._pipeline.tensors[number].buffers
        found = {}
        persistent = layer.state_dict(keep_vars=True)
        for name, buffer in layer.named_buffers():
            key = f"layers.{number}.{name}"
            if name in persistent and name not in own and key in self._sizes:
                found[key] = (buffer, torch.empty_like(buffer))
        return found

    def _key_of(self, number: int, note: TensorNote) -> str:
        """Whatever was persistent where it was written."""
        persistent = _key(number, note, is_persistent=True)
        return persistent if persistent in self._sizes else _key(number, note, is_persistent=False)

    def _texts(self, names: list[str]) -> dict[str, str]:
        found: dict[str, Tensor] = {}
        for name in names:
            if name not in self._sizes:
                raise ValueError(f"the checkpoint has no {name}")
            found[name] = torch.empty(self._sizes[name], dtype=torch.uint8)
        self._load(found)
        return {name: bytes(one.tolist()).decode() for name, one in found.items()}

    def _load(self, tensors: dict[str, Tensor]) -> None:
        """Read into these tensors, this rank alone."""
        different = [name for name, one in tensors.items() if self._sizes.get(name) != one.shape]
        if different:
            raise ValueError(f"the checkpoint lacks {different[0]}, or has it in another shape")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is meant
            if tensors:
                dcp.load(tensors, storage_reader=self._reader, no_dist=True)


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
