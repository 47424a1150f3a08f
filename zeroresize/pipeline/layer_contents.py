"""A layer takes its parameters, gradients, optimizer state, buffers and extra state along to another stage.

The sender describes it, so the receiver knows what will come. Nothing is computed from it: all arrives bit for bit.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.pipeline.stage_layers import LayerTensors
from zeroresize.resharding.parameter_state import (
    GRADIENT,
    PARAMETER,
    STATE,
    ParameterState,
    StateKind,
    dtype_of,
    emptied,
    replace_data,
    why_of_fixed_size,
)
from zeroresize.utils.codec import decoded, encoded, plain_value
from zeroresize.utils.torch_private import buffers_of

BUFFER, EXTRA, HAS_GRADIENT = "buffer", "extra state", "has gradient"


@dataclass(frozen=True)
class TensorNote:
    """Describes one tensor that travels with a layer.

    Attributes:
        name: of the parameter, buffer or module within its layer.
        what: PARAMETER, GRADIENT, BUFFER, EXTRA, or STATE and the key of optimizer state; HAS_GRADIENT tells of each
            GRADIENT of the layer whether it is one, or only room for one that did not come.
        dtype: without ``torch.``.
        stride: of a dense layout, which the receiver's tensor has, too.
        is_on_cpu: whether it is there wherever the parameter is, as the steps of most optimizers are.
    """

    name: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_on_cpu: bool

    @classmethod
    def of(cls, name: str, what: str, tensor: Tensor) -> TensorNote:
        """Return the note of a dense tensor."""
        dtype, is_on_cpu = str(tensor.dtype).removeprefix("torch."), tensor.device.type == "cpu"
        return cls(name, what, dtype, tuple(tensor.shape), tensor.stride(), is_on_cpu)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize

    @property
    def is_constant(self) -> bool:
        """Return whether nothing but an optimizer's step changes the tensor: forward and backward do not."""
        return self.what == PARAMETER or self.what.startswith(STATE)

    def new(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape, stride and dtype, on ``device`` or the CPU."""
        where = torch.device("cpu") if self.is_on_cpu else device
        return torch.empty_strided(self.shape, self.stride, dtype=dtype_of(self.dtype), device=where)


@dataclass(frozen=True)
class ParameterNote:
    """Describes what belongs to a parameter besides tensors.

    Attributes:
        group: the optimizer's parameter group that holds it; None for none.
        state: what is no tensor of its optimizer state.
    """

    group: int | None
    requires_grad: bool
    state: dict[str, Any]


@dataclass(frozen=True)
class LayerNote:
    """Describes all that a layer takes along.

    Attributes:
        layer: its number.
        tensors: in the order in which they travel.
        parameters: by name within the layer.
        missing_buffers: which are None.
        training: of each module of the layer.
    """

    layer: int
    tensors: tuple[TensorNote, ...]
    parameters: dict[str, ParameterNote]
    missing_buffers: tuple[str, ...] = ()
    training: tuple[bool, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all its tensors."""
        return sum(one.num_bytes for one in self.tensors)

    def of_parameters(self, names: Iterable[str]) -> LayerNote:
        """Return the note of these parameters alone."""
        parameters = {name: self.parameters[name] for name in names if name in self.parameters}
        tensors = (one for one in self.tensors if one.name in parameters and one.what not in (BUFFER, EXTRA))
        return LayerNote(self.layer, tuple(tensors), parameters)


def notes_to_json(notes: Iterable[LayerNote]) -> str:
    """Return a text that :func:`notes_from_json` reads."""
    return json.dumps([encoded(one) for one in notes])


def notes_from_json(text: str) -> list[LayerNote]:
    """Return the notes of which :func:`notes_to_json` has made the text."""
    return [decoded(LayerNote, fields, "layer") for fields in json.loads(text)]


def describe(
    number: int,
    layer: nn.Module,
    layer_tensors: LayerTensors,
    optimizer: torch.optim.Optimizer | None,
    groups: Mapping[int, int],
    *,
    with_room: bool = False,
) -> tuple[LayerNote, list[Tensor]]:
    """Return the note of a layer of this stage, and its tensors in the note's order, without copies.

    Args:
        groups: the number of each parameter's group in the optimizer, by the parameter's ``id``.
        with_room: whether a gradient that may yet come has a note, too, with the parameter in its place.

    Raises:
        ValueError: for a sparse gradient, a tensor of a parameter's size as its attribute, and optimizer state of other
            kinds than tensors, numbers and texts.
    """
    contents: list[tuple[str, str, Tensor]] = []
    has_gradient: list[bool] = []
    parameters = {}
    for name, parameter in layer_tensors.parameters.items():
        path = f"{layer_tensors.path}.{name}"
        if reason := why_of_fixed_size(path, parameter):
            raise ValueError(f"{reason}, so its layer cannot move")
        state = ParameterState(path, parameter, parameter, optimizer)
        state.require_dense_gradients()
        weight, gradient = state.tensors[PARAMETER], state.tensors.get(GRADIENT)
        contents.append((name, PARAMETER, weight))
        if gradient is not None or (with_room and parameter.requires_grad):
            contents.append((name, GRADIENT, weight if gradient is None else gradient))
            has_gradient.append(gradient is not None)
        plain: dict[str, Any] = {}
        for key, kind, value in state.entries():
            if isinstance(value, Tensor):  # a layer is whole: what has another shape goes along, too
                contents.append((name, STATE + key, value.detach()))
            elif kind is StateKind.PLAIN:
                plain[key] = value
            else:
                raise ValueError(
                    f"{state.name}: its optimizer keeps {key!r} as a {type(value).__name__}; a layer can only take "
                    "tensors, numbers and texts along"
                )
        parameters[name] = ParameterNote(groups.get(id(parameter)), parameter.requires_grad, plain)
    buffers = {name: buffers_of(module)[key] for name, (module, key) in layer_tensors.buffers.items()}
    contents += [(name, BUFFER, buffer.detach()) for name, buffer in buffers.items() if buffer is not None]
    contents += [(path, EXTRA, extra) for path, extra in extra_state_of(number, layer).items()]
    if with_room:
        contents.append(("", HAS_GRADIENT, torch.tensor(has_gradient, dtype=torch.uint8, device="cpu")))
    tensors = [_dense(tensor) for *_, tensor in contents]
    notes = tuple(TensorNote.of(name, what, tensor) for (name, what, _), tensor in zip(contents, tensors, strict=True))
    missing = tuple(name for name, buffer in buffers.items() if buffer is None)
    return LayerNote(number, notes, parameters, missing, tuple(each.training for each in layer.modules())), tensors


def extra_state_of(number: int, layer: nn.Module) -> dict[str, Tensor]:
    """Return the bytes of what each module of a layer has as extra state, by the module's name.

    Raises:
        ValueError: for what could run code where it is read.
    """
    extra_state = {}
    for path, module in layer.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            stream = io.BytesIO()
            torch.save(module.get_extra_state(), stream)
            extra_state[path] = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
            stream.seek(0)
            plain_value(stream, _extra_name(number, path))
    return extra_state


def _extra_name(number: int, path: str) -> str:
    return f"extra state of layers.{number}.{path}".rstrip(".")


def require_fitting(note: LayerNote, layer: nn.Module, layer_tensors: LayerTensors, groups: Mapping[int, int]) -> None:
    """Check that a note of a layer fits the layer of the same number here.

    Raises:
        ValueError: if the layer has other parameters or buffers here, or the optimizer has them in other groups.
    """
    names = sorted(note.parameters), len(note.training)
    buffers = {one.name for one in note.tensors if one.what == BUFFER} | set(note.missing_buffers)
    if (
        names != (sorted(layer_tensors.parameters), sum(1 for _ in layer.modules()))
        or buffers != layer_tensors.buffers.keys()
    ):
        raise ValueError(
            f"{layer_tensors.path} has the parameters {names[0]} and buffers {sorted(buffers)} where it comes from, "
            f"and {sorted(layer_tensors.parameters)} and {sorted(layer_tensors.buffers)} here: layers must be built "
            "alike on all ranks"
        )
    for name, parameter in layer_tensors.parameters.items():
        there, here = note.parameters[name].group, groups.get(id(parameter))
        if there != here:
            raise ValueError(
                f"{layer_tensors.path}.{name} is in parameter group {there} of the optimizer where it comes from, and "
                f"in {here} here: give every rank's optimizer all of pipeline.parameters(), in the same groups"
            )


class Arrived:
    """Holds a layer that has come to this rank, ``new`` tensors in the note's order, until it is installed."""

    def __init__(self, note: LayerNote, layer: nn.Module, layer_tensors: LayerTensors, new: Sequence[Tensor]) -> None:
        self._note, self._layer, self._tensors = note, layer, layer_tensors
        self._new = {(one.name, one.what): tensor for one, tensor in zip(note.tensors, new, strict=True)}
        gradients = [key for key in self._new if key[1] == GRADIENT]
        has_gradient = self._new.pop(("", HAS_GRADIENT), torch.ones(len(gradients)))
        for key, is_there in zip(gradients, has_gradient.tolist(), strict=True):
            if not is_there:
                del self._new[key]

    def read_extra_state(self) -> None:
        """Read the modules' extra state.

        Raises:
            ValueError: for what is damaged or could run code.
        """
        self._extra: dict[str, Any] = {}
        for (path, what), tensor in self._new.items():
            if what == EXTRA:
                stream = io.BytesIO(bytes(tensor.numpy()))
                self._extra[path] = plain_value(stream, _extra_name(self._note.layer, path))

    def install(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Put what has come in place of what is here; only a ``set_extra_state`` of the layer could fail."""
        for name, parameter in self._tensors.parameters.items():
            note = self._note.parameters[name]
            new = {what: tensor for (of, what), tensor in self._new.items() if of == name}
            state = ParameterState(f"{self._tensors.path}.{name}", parameter, parameter, optimizer)
            state.install_whole(new, note.state, requires_grad=note.requires_grad)
        for name, (module, key) in self._tensors.buffers.items():
            arrived, known = self._new.get((name, BUFFER)), buffers_of(module)[key]
            if arrived is not None and known is not None:
                replace_data(known, arrived, None)
            else:
                buffers_of(module)[key] = arrived
        for module, training in zip(self._layer.modules(), self._note.training, strict=True):
            module.training = training
        for path, extra in self._extra.items():
            self._layer.get_submodule(path).set_extra_state(extra)


def let_go(layer_tensors: LayerTensors, optimizer: torch.optim.Optimizer | None) -> None:
    """Empty the tensors of a layer, which another rank has now, and forget its optimizer state."""
    for name, parameter in layer_tensors.parameters.items():
        ParameterState(name, parameter, parameter, optimizer).empty()
    for module, key in layer_tensors.buffers.values():
        buffer = buffers_of(module)[key]
        if buffer is not None:
            replace_data(buffer, emptied(buffer, buffer.device), None)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor's memory as [bytes]."""
    begin = tensor.storage_offset() * tensor.itemsize
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), begin, (tensor.numel() * tensor.itemsize,), (1,))


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself where its elements lie side by side, in whatever order; else a copy."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor if tensor.stride() == strides else torch.empty_like(tensor).copy_(tensor)
