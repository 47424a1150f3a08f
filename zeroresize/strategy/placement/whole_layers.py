"""Which tensors a model of whole layers has, and the modules of a rank that holds a part of them.

``P`` tensors, ``U`` units of a tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import Segment
from zeroresize.layers.splitting import checked_parts
from zeroresize.layers.whole_parameters import path_of, require_references_within_stages, require_whole_parameters
from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.runtime.activations import copied_on_meta
from zeroresize.utils.torch_private import parameters_of, unsaved_buffers_of

#: ``segments(number, layer)`` tells which linear layers of a layer are divided, and by which units.
SegmentsOf = Callable[[int, nn.Module], Iterable[Segment]]
#: ``initialize(number, layer)`` fills the parameters and buffers of a layer, alike on all ranks.
Initialize = Callable[[int, nn.Module], object]


@dataclass(frozen=True)
class WholeTensor:
    """Describes a parameter of the undivided model.

    Attributes:
        spec: its name, shape and division.
        own_name: within its layer.
    """

    spec: TensorSpec
    own_name: str
    dtype: torch.dtype
    requires_grad: bool

    def stack(self, tensor: Tensor, num_units: int) -> Tensor:
        """Return a part of so many units as [pre, parts, units, inner]; a view of it if it is contiguous.

        What is not divided has a unit for every element here, so that parts of it can travel.
        """
        division = self.spec.division
        if division is None:
            return tensor.reshape(1, 1, -1, 1)
        before, after = tensor.shape[: division.dim], tensor.shape[division.dim + 1 :]
        return tensor.reshape(math.prod(before), division.num_parts, num_units, division.rows * math.prod(after))

    def part_of(self, whole: Tensor, units: range) -> Tensor:
        """Copy these units of the whole tensor."""
        if self.spec.division is None:
            return whole.detach().clone(memory_format=torch.contiguous_format)
        part = self.stack(whole.detach(), self.spec.num_units)[:, :, units.start : units.stop]
        return part.clone(memory_format=torch.contiguous_format).view(self.spec.local_shape(len(units)))


class WholeLayers:
    """Describes a model of whole layers, and builds a rank's parts of them.

    Args:
        layers: built alike on all ranks, real or on meta.
        segments: see :data:`SegmentsOf`; None for each layer's method ``segments``, if its class has one.
        compute_dtype: in which a rank's parts of them compute, as after ``layer.to(compute_dtype)``; None for that of
            the parameters.

    Attributes:
        tensors: [P], in the order of the layers and of their ``named_parameters``.
        ties: numbers of tensors that are one parameter (tied weights). Each of the layers has a copy, and gradients of
            copies are to be summed.
        compute_dtype: as given.

    Raises:
        ValueError: for layers inside DistributedDataParallel or FSDP, parameters that are no plain tensors, that layers
            refer to without having them, or that several layers have and segments divide, buffers that state
            dictionaries hold, and segments whose layers do not exist, are no ``nn.Linear``, or do not fit each other.
            For a ``compute_dtype`` of other than floating-point numbers, and parameters not where it is given.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        segments: SegmentsOf | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._segments = segments or _own_segments
        self._layers, self.compute_dtype = list(layers), compute_dtype
        if not self._layers:
            raise ValueError("a model needs at least one layer")
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype={compute_dtype} is not allowed: a type such as torch.bfloat16 is needed")
        require_whole_parameters(self._layers)
        require_references_within_stages(self._layers, range(len(self._layers)))
        _require_constant_buffers(self._layers)
        self.tensors: list[WholeTensor] = []
        numbers_of: dict[Tensor, list[int]] = {}
        for number, layer in enumerate(self._layers):
            divisions = _divisions(number, layer, self._segments(number, layer))
            for name, parameter in layer.named_parameters():
                full_name, shape = path_of(number, name), tuple(parameter.shape)
                if compute_dtype is not None and not parameter.is_floating_point():
                    raise ValueError(
                        f"{full_name} is of {parameter.dtype}: with compute_dtype={compute_dtype} all parameters must "
                        "be of floating-point numbers"
                    )
                numbers_of.setdefault(parameter, []).append(len(self.tensors))
                spec = TensorSpec(full_name, number, shape, parameter.element_size(), divisions.get(name))
                self.tensors.append(WholeTensor(spec, name, parameter.dtype, parameter.requires_grad))
        self.ties = [numbers for numbers in numbers_of.values() if len(numbers) > 1]
        for tie in self.ties:
            names = [self.tensors[index].spec.name for index in tie]
            if any(self.tensors[index].spec.division is not None for index in tie):
                raise ValueError(f"{names} are one parameter, which segments cannot divide: give each layer its own")

    @property
    def num_layers(self) -> int:
        """Return L."""
        return len(self._layers)

    @property
    def on_meta(self) -> list[nn.Module]:
        """Return [L] the whole layers with parameters on meta, as they compute, once weights are taken."""
        return list(self._layers)

    def take_weights(
        self,
        device: torch.device,
        initialize: Initialize | None,
        part: Callable[[int, WholeTensor, Tensor], None],
    ) -> None:
        """Give every whole parameter to ``part(number of the tensor, tensor, parameter)``, layer by layer.

        Layers on meta are made and filled one at a time, so that one whole layer is held at most. Afterwards the
        layers given are not needed any more.

        Raises:
            ValueError: for layers on meta without ``initialize``.
        """
        tensors = iter(enumerate(self.tensors))
        first_of = {index: tie[0] for tie in self.ties for index in tie}
        filled: dict[int, Tensor] = {}  # tied parameters, by the first layer that has them
        for number, layer in enumerate(self._layers):
            whole = layer
            if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
                if initialize is None:
                    raise ValueError(f"layer {number} is on meta: initialize(number, layer) is needed, to fill it")
                whole = copy.deepcopy(layer).to_empty(device=device)
                initialize(number, whole)
            for name, parameter in whole.named_parameters():
                index, tensor = next(tensors)
                known = tensor.own_name, tensor.spec.shape, tensor.dtype
                if (name, tuple(parameter.shape), parameter.dtype) != known:
                    raise ValueError(f"initialize({number}, layer) changed {tensor.spec.name}: it may only fill it")
                part(index, tensor, filled.setdefault(first_of[index], parameter) if index in first_of else parameter)
            on_meta = copied_on_meta(whole, device)
            self._layers[number] = on_meta if self.compute_dtype is None else on_meta.to(self.compute_dtype)

    def shard(
        self, number: int, device: torch.device, process_group: ProcessGroup, units: Mapping[str, range]
    ) -> nn.Module:
        """Build a rank's part of a layer; its weights are yet to come: see :func:`hollow`.

        Args:
            process_group: the tensor-parallel group.
            units: that the rank holds of the layer's parameters, by their name within the layer.
        """
        layer = copied_on_meta(self._layers[number], device)
        shapes = {
            tensor.own_name: tensor.spec.local_shape(len(units[tensor.own_name]))
            for tensor in self.tensors
            if tensor.spec.layer == number
        }
        # Asked of the copy, so that on_change is that of the copy.
        for segment in list(self._segments(number, layer)):
            row = f"{_name_of(layer, segment.row)}.weight"
            for linear in segment.column:
                column = f"{_name_of(layer, linear)}.weight"
                _shard_linear(layer, column, ColumnParallelLinear, shapes[column][0], process_group)
            _shard_linear(layer, row, RowParallelLinear, shapes[row][1], process_group)
            if segment.on_change is not None:
                segment.on_change(list(units[row]))
        for name, parameter in list(layer.named_parameters()):
            empty = nn.Parameter(hollow(shapes[name], parameter.dtype, device), parameter.requires_grad)
            for module in layer.modules():
                parameters = parameters_of(module)
                parameters.update({key: empty for key, known in parameters.items() if known is parameter})
        return layer


def _own_segments(number: int, layer: Any) -> Iterable[Segment]:
    """What the layer's method ``segments`` tells, if its class has it."""
    return layer.segments() if hasattr(type(layer), "segments") else ()


def hollow(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make what is in place of a weight that is elsewhere: NaN of its shape, in the memory of one element."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(tuple(shape))


def _divisions(number: int, layer: nn.Module, segments: Iterable[Segment]) -> dict[str, UnitDivision]:
    """How the parameters of the segments' layers are divided, by their names within the layer."""
    divisions: dict[str, UnitDivision] = {}
    for segment in segments:
        row_name = _name_of(layer, segment.row)
        title = f"layer {number}: Segment(column={list(segment.column)}, row={segment.row!r})"
        row = _linear(layer, row_name, title)
        if segment.shared:
            raise ValueError(
                f"{title}: shared= is not allowed in strategies: name a key's head with all its queries a unit"
            )
        if segment.extra:
            raise ValueError(f"{title}: extra= is not allowed in strategies")
        if segment.unit_size < 1 or row.in_features % segment.unit_size:
            raise ValueError(
                f"{title}: the {row.in_features} input features of {row_name} are no units of "
                f"unit_size={segment.unit_size}"
            )
        num_units = row.in_features // segment.unit_size
        of_segment = {f"{row_name}.weight": UnitDivision(1, num_units, segment.unit_size)}
        for linear in segment.column:
            name = _name_of(layer, linear)
            column = _linear(layer, name, title)
            parts = checked_parts(
                1 if segment.parts is None else segment.parts,
                column.out_features,
                num_units,
                f"{title}: {name}",
                "units",
            )
            if len(set(parts)) > 1:
                raise ValueError(f"{title}: parts={segment.parts!r} of different sizes: make a layer of each part")
            division = UnitDivision(0, num_units, parts[0] // num_units, len(parts))
            of_segment |= {f"{name}.{key}": division for key, _ in column.named_parameters()}
        names: dict[int, list[str]] = {}
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for places in names.values():
            if len(places) > 1 and not of_segment.keys().isdisjoint(places):
                raise ValueError(f"{title}: {places} are one parameter, which cannot be divided")
        twice = sorted(of_segment.keys() & divisions.keys())
        if twice:
            raise ValueError(f"{title}: {twice} are in another segment, too")
        divisions |= of_segment
    return divisions


def _name_of(layer: nn.Module, linear: str | nn.Module) -> str:
    if isinstance(linear, str):
        return linear
    names = [name for name, module in layer.named_modules() if module is linear]
    if not names:
        raise ValueError(f"the segment's {type(linear).__name__} is no module of the layer {type(layer).__name__}")
    return names[0]


def _linear(layer: nn.Module, name: str, title: str) -> nn.Linear:
    try:
        module = layer.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"{title}: {type(layer).__name__} has no module {name!r}") from error
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{title}: {name} is a {type(module).__name__}; allowed is a torch.nn.Linear")
    return module


def _require_constant_buffers(layers: Sequence[nn.Module]) -> None:
    """Check that no buffer holds what a switch would lose."""
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                if buffer is not None and name.rpartition(".")[2] not in unsaved_buffers_of(module):
                    raise ValueError(
                        f"{path_of(number, name)} is a buffer that state dictionaries hold, and what it comes to hold "
                        "would be lost in a switch: allowed are constant ones, register_buffer(..., persistent=False)"
                    )


def _shard_linear(
    layer: nn.Module,
    weight: str,
    kind: type[ColumnParallelLinear] | type[RowParallelLinear],
    own_features: int,
    process_group: ProcessGroup,
) -> None:
    """Put a parallel layer in place of the linear one that has this weight."""
    path, _, attribute = weight.removesuffix(".weight").rpartition(".")
    linear = getattr(layer.get_submodule(path), attribute)
    sharded = kind(
        linear.in_features,
        linear.out_features,
        process_group=process_group,
        bias=linear.bias is not None,
        own_features=own_features,
        device="meta",
        dtype=linear.weight.dtype,
    )
    for parameter, of_linear in zip(sharded.parameters(), linear.parameters(), strict=True):
        parameter.requires_grad_(of_linear.requires_grad)
    setattr(layer.get_submodule(path), attribute, sharded.train(linear.training))
