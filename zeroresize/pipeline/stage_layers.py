"""A stage of a pipeline has all layers of the model, some with their tensors, the others without, and runs those.

Every rank has every module and every Parameter object. Where a layer is **away**, on another stage, its parameters and
buffers have no elements: their first dimension is 0. So an optimizer that is given all parameters has the same groups
on every rank, whatever layers do, and hooks and references stay. A parameter that several layers have, as tied
embeddings and heads, is on every stage with one of them.

Watchers are told what the layers compute, forward and backward; the loss is watched as one more layer, L. Autograd's
graph knows no layers. But the gradient of a layer's output arrives when everything behind the layer has been computed,
and autograd runs nodes in the reverse order of their forward. So a layer's backward, with all that is recomputed in it,
lasts from the arrival of its output's gradient until that of the layer before, or until the end of the stage's
backward. Nodes that autograd runs out of that order, as those of graphs on several devices, count for a neighbour.
Messages belong to no layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.layers.whole_parameters import path_of, require_references_within_stages, users_of_parameters
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import PipelineLoad, balanced_partition
from zeroresize.resharding.parameter_state import emptied, replace_data
from zeroresize.utils.torch_private import buffers_of, parameters_of

#: Fills the tensors of a layer, by its number, that was built on the meta device.
Initialize = Callable[[int, nn.Module], object]


class LayerWatcher:
    """Is told within a ``with`` block; spans do not overlap, and layers that arrive meanwhile are watched, too.

    Of several watchers the first one is told first of an end, and last of a begin. Of a backward, a thread of autograd
    may tell.

    Args:
        watchers: ``pipeline.module.watchers``.
    """

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers

    def __enter__(self) -> Any:
        self._watchers.everyone.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._watchers.everyone.remove(self)

    def step_begins(self, num_microbatches: int) -> None:
        """Of training."""

    def begins(self, number: int, is_forward: bool, inputs: Sequence[Any]) -> None:
        """A layer's forward, with its inputs, or its backward, without."""

    def ends(self, number: int, is_forward: bool) -> None:
        """A layer's forward, also where it failed, or its backward."""

    def backward_reaches(self, number: int | None) -> None:
        """Backward of a micro-batch is over for all layers behind this one; for all layers if None."""


class Watchers:
    """Tells everyone who watches what a stage computes."""

    def __init__(self) -> None:
        self.everyone: list[LayerWatcher] = []
        self._now: int | None = None  # the layer whose backward is running

    def step_begins(self, num_microbatches: int) -> None:
        """Tell that a step begins."""
        self._now = None
        for watcher in self.everyone:
            watcher.step_begins(num_microbatches)

    def call(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Return what a layer returns, while it is watched."""
        if not self.everyone:
            return layer(*inputs)
        everyone = self.everyone[:]
        for watcher in reversed(everyone):
            watcher.begins(number, True, inputs)
        try:
            outputs = layer(*inputs)
        finally:
            for watcher in everyone:
                watcher.ends(number, True)
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._arrived, number))
        return outputs

    def backward_ends(self) -> None:
        """Tell that backward of a micro-batch is over on this stage."""
        self._pass_to(None)

    def _arrived(self, number: int, gradient: Tensor) -> None:
        """Of a layer's output: of several, the first one counts; nor does that of a layer that returns its input."""
        if self._now is None or number < self._now:
            self._pass_to(number)

    def _pass_to(self, number: int | None) -> None:
        ended, self._now = self._now, number
        for watcher in self.everyone:
            if ended is not None:
                watcher.ends(ended, False)
            watcher.backward_reaches(number)
        if number is not None:
            for watcher in reversed(self.everyone):
                watcher.begins(number, False, ())


class StageLayers(nn.Module):
    """Runs the present layers of one pipeline stage, of all [L], one after another, which may be watched.

    Each takes what the one before returns: a tensor or a tuple of tensors. Names are ``layers.7.…`` on every stage.
    """

    def __init__(self, layers: Sequence[nn.Module], present: range) -> None:
        super().__init__()
        self.layers, self.present = nn.ModuleList(layers), present
        self.watchers = Watchers()

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the last present layer returns."""
        tensors = inputs
        for number in self.present:
            tensors = self.run(number, tensors)
        return tensors[0] if len(tensors) == 1 else tensors

    def run(self, number: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one layer and return its outputs, contiguous, so that they can be sent.

        Raises:
            ValueError: if it returns anything else than tensors with dimensions.
        """
        outputs = self.watchers.call(number, self.layers[number], *inputs)
        tensors = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        if not all(isinstance(one, Tensor) and one.dim() for one in tensors):
            kinds = [f"a {one.dim()}-dimensional tensor" if isinstance(one, Tensor) else type(one) for one in tensors]
            raise ValueError(
                f"layers.{number} must return a tensor, or a tuple of tensors, with the batch as their first "
                f"dimension; it returns {kinds}"
            )
        return tuple(one.contiguous() for one in tensors)


@dataclass(frozen=True)
class Tie:
    """Describes a parameter that several layers have (tied weights): it is on every stage with one of them.

    Attributes:
        name: within the first of the layers.
        layers: their numbers, ascending.
    """

    parameter: Tensor
    name: str
    layers: tuple[int, ...]

    @property
    def path(self) -> str:
        """Return its name in the whole model."""
        return path_of(self.layers[0], self.name)

    @property
    def tensors(self) -> LayerTensors:
        """Return it alone, as it travels and as the first layer has it."""
        return LayerTensors(path_of(self.layers[0], ""), {self.name: self.parameter}, {})

    def holders(self, stages: Sequence[int]) -> list[int]:
        """Return the stages that have it, ascending, by the stage of each layer [L]."""
        return sorted({stages[number] for number in self.layers})


def ties_of(layers: Sequence[nn.Module]) -> list[Tie]:
    """Return the parameters that several layers have, in the order of the first of these."""
    return [
        Tie(parameter, users[0][1], tuple(number for number, _ in users))
        for parameter, users in users_of_parameters(layers).items()
        if len(users) > 1
    ]


def divided_by_parameters(layers: Sequence[nn.Module], num_stages: int) -> Partition:
    """Return the partition of layers [L] whose largest stage has the fewest parameters, frozen ones included.

    Where equally many layers on each stage are as good, it is that one, and where a layer would be parted from another
    one whose parameter it refers to. Tensors may be on the meta device. It is a ValueError if there are fewer layers
    than stages.
    """
    uniform = Partition.uniform(len(layers), num_stages)
    load = PipelineLoad.of([float(num_parameters(layer)) for layer in layers], num_stages)
    balanced = balanced_partition(load)
    if load.slowest(balanced) >= load.slowest(uniform):
        return uniform
    try:
        require_references_within_stages(layers, balanced.stages)
    except ValueError:
        return uniform
    return balanced


def num_parameters(layer: nn.Module) -> int:
    """Return how many elements the parameters of a layer have."""
    return sum(parameter.numel() for parameter in layer.parameters())


@dataclass(frozen=True)
class LayerTensors:
    """Holds what belongs to a layer alone, by name within it, and so moves with it; or a tied parameter alone.

    Attributes:
        path: of the layer.
        parameters: without those that an earlier layer has, too.
        buffers: each as (module, name there). Not those that several layers share, such as a table of rotary
            embeddings: these are on every stage.
    """

    path: str
    parameters: Mapping[str, Tensor]
    buffers: dict[str, tuple[nn.Module, str]]

    def without(self, ties: Iterable[Tie]) -> LayerTensors:
        """Return all but tied parameters."""
        tied = {tie.parameter for tie in ties}
        return replace(self, parameters={name: one for name, one in self.parameters.items() if one not in tied})


def tensors_by_layer(layers: Sequence[nn.Module]) -> list[LayerTensors]:
    """Return what moves with each layer [L]."""
    num_users = Counter(id(one) for layer in layers for one in (*layer.modules(), *layer.buffers()))
    seen: set[int] = set()
    by_layer = []
    for number, layer in enumerate(layers):
        parameters = {name: one for name, one in layer.named_parameters() if id(one) not in seen}
        seen |= set(map(id, parameters.values()))
        buffers = {
            f"{path}.{name}".lstrip("."): (module, name)
            for path, module in layer.named_modules()
            for name, buffer in buffers_of(module).items()
            if num_users[id(module)] == 1 and (buffer is None or num_users[id(buffer)] == 1)
        }
        by_layer.append(LayerTensors(path_of(number, ""), parameters, buffers))
    return by_layer


def require_initialize(layers: Sequence[nn.Module], present: range, initialize: Initialize | None) -> None:
    """Check that what is on the meta device will be filled: by ``initialize``, and on the stage where it belongs.

    Raises:
        ValueError: for present layers there without ``initialize``, and for buffers there that several layers share.
    """
    on_meta = [number for number in present if _is_on_meta(layers[number])]
    if on_meta and initialize is None:
        raise ValueError(
            f"layers {on_meta} are on the meta device: pass initialize=, a function of a layer's number and the layer "
            "that fills its parameters and buffers"
        )
    in_one_layer = {
        id(buffers_of(module)[name]) for layer in tensors_by_layer(layers) for module, name in layer.buffers.values()
    }
    for number, layer in enumerate(layers):
        for name, buffer in layer.named_buffers():
            if buffer.is_meta and id(buffer) not in in_one_layer:
                raise ValueError(
                    f"{path_of(number, name)} is on the meta device and belongs to several layers, so every stage "
                    "needs it and nobody would fill it everywhere: build it on a real device"
                )


def place(layers: Sequence[nn.Module], present: range, device: torch.device, initialize: Initialize | None) -> None:
    """Put the present layers' tensors on ``device``, fill those on the meta device, and let go of the other layers'."""
    on_meta = [number for number in present if _is_on_meta(layers[number])]
    moving: set[int] = set()
    for number, layer_tensors in enumerate(tensors_by_layer(layers)):
        if number not in present:
            moving |= set(map(id, layer_tensors.parameters.values()))
            moving |= {id(buffers_of(module)[name]) for module, name in layer_tensors.buffers.values()}
    moving -= {id(one) for number in present for one in layers[number].parameters()}  # tied ones are here, too
    placed: dict[int, tuple[Tensor, Tensor]] = {}  # with the old ones, lest others get their id
    for module in (module for layer in layers for module in layer.modules()):
        of_module: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for tensors in of_module:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    new = _placed(tensor, id(tensor) in moving, device)
                    placed[id(tensor)] = placed[id(new)] = tensor, new
                tensors[name] = placed[id(tensor)][1]
    for number in on_meta:
        assert initialize is not None
        with torch.no_grad():
            earlier = [one for each in present[: number - present.start] for one in layers[each].parameters()]
            tied = [(one, one.clone()) for one in set(earlier) & set(layers[number].parameters())]
            initialize(number, layers[number])
            for parameter, filled in tied:  # by the first layer that has it, in whatever division
                parameter.copy_(filled)


def _placed(tensor: Tensor, is_away: bool, device: torch.device) -> Tensor:
    """The same tensor, but for a new one where it was on the meta device."""
    if tensor.is_meta:
        data = emptied(tensor, device) if is_away else torch.empty_like(tensor, device=device, requires_grad=False)
        return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    if is_away:
        replace_data(tensor, emptied(tensor, device), None)
    elif tensor.device != device:
        replace_data(tensor, tensor.data.to(device), None)
    return tensor


def _is_on_meta(layer: nn.Module) -> bool:
    return any(one.is_meta for one in (*layer.parameters(), *layer.buffers()))
