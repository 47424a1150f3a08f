"""A parameter that moves to other ranks takes along its gradient and what the optimizer keeps of it.

This is the only place that takes a parameter's tensors apart and puts others in place of them, and the only one that
tells what optimizer state is to its parameter. Whoever moves parameters decides by these kinds what travels, what is
the same for all ranks, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zeroresize.layers.local_parts import local_of, with_local
from zeroresize.optim.optimizers import require_stepping, torch_optimizer, why_sharded
from zeroresize.resharding.accumulator_hooks import KeptHooks
from zeroresize.utils.texts import alike, at_fault, by_rank
from zeroresize.utils.torch_private import is_dtensor, set_local_tensor

PARAMETER, GRADIENT, MASTER, MASTER_GRADIENT, STATE = "parameter", "gradient", "master", "master gradient", "state "
GRADIENTS = (GRADIENT, MASTER_GRADIENT)


class StateKind(Enum):
    """Tells what an entry of an optimizer's state is to its parameter: all but the first kind belong to the whole."""

    LIKE_PARAMETER = "a tensor of its shape, such as Adam's moments, which divides as it does"
    NUMBER = "a tensor of one element, such as Adam's step"
    PLAIN = "a bool, number, text or None"
    OTHER_TENSOR = "a tensor of another shape, such as Adafactor's rows, which cannot be divided"
    OTHER = "anything else, which cannot be sent"


def kind_of_state(key: str, value: Any, parameter: Tensor) -> StateKind:
    """Return what an optimizer's state is to its parameter: to the tensor that the optimizer steps."""
    if isinstance(value, Tensor):
        # With one element, the step is of the parameter's shape by accident.
        is_of_shape = value.shape == parameter.shape and is_dtensor(value) == is_dtensor(parameter)
        if is_of_shape and not (key == "step" and value.numel() == 1):
            return StateKind.LIKE_PARAMETER
        return StateKind.NUMBER if value.numel() == 1 else StateKind.OTHER_TENSOR
    return StateKind.PLAIN if isinstance(value, bool | int | float | str | None) else StateKind.OTHER


class ParameterState:
    """Takes a parameter of this rank apart: its weight, its gradient, and what the optimizer keeps of it.

    Attributes:
        stepped: what the optimizer steps for the parameter: itself, or a master copy; None if nothing.
        tensors: that have the parameter's shape, by what they are: PARAMETER, GRADIENT, MASTER, MASTER_GRADIENT, and
            STATE with the key of optimizer state. Gradients may be sparse. Of DTensors these are the local parts.
    """

    def __init__(
        self, name: str, parameter: Tensor, stepped: Tensor | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.name, self.parameter, self.stepped, self._optimizer = name, parameter, stepped, optimizer
        self.tensors: dict[str, Tensor] = {PARAMETER: local_of(parameter).detach()}
        main_grad = getattr(parameter, "main_grad", None)  # of Megatron's buffers, which are made anew
        if parameter.grad is not None and parameter.grad is not main_grad:
            self.tensors[GRADIENT] = local_of(parameter.grad).detach()
        if stepped is not None and stepped is not parameter:
            self.tensors[MASTER] = local_of(stepped).detach()
            if stepped.grad is not None and stepped.grad is not main_grad:
                self.tensors[MASTER_GRADIENT] = local_of(stepped.grad).detach()
        self._state: Mapping[str, Any] = {}
        if optimizer is not None and stepped is not None and stepped in optimizer.state:
            self._state = optimizer.state[stepped]
        self.tensors |= {
            STATE + key: local_of(value) for key, kind, value in self.entries() if kind is StateKind.LIKE_PARAMETER
        }

    @property
    def has_state(self) -> bool:
        """Return whether the optimizer keeps anything of the parameter."""
        return bool(self._state)

    def entries(self) -> Iterator[tuple[str, StateKind, Any]]:
        """Yield each entry of the optimizer's state as (key, kind, value), in the optimizer's order."""
        for key, value in self._state.items():
            yield key, kind_of_state(key, value, self.stepped if self.stepped is not None else self.parameter), value

    def device_of(self, what: str) -> torch.device:
        """Return the device of one of :attr:`tensors`, or where it would be if this rank had it."""
        known = self.tensors.get(what)
        if known is None:
            known = self.parameter if what in (PARAMETER, GRADIENT) or self.stepped is None else self.stepped
        return known.device

    def description(self, num_units: int = 1) -> Description:
        """Describe what this rank holds, for the other ranks that the parameter is divided over.

        Of a parameter without units here, state of another shape is nobody's and left out.
        """
        self.require_dense_gradients()
        for key, kind, value in self.entries():
            if kind is StateKind.OTHER or (kind is StateKind.OTHER_TENSOR and num_units):
                is_tensor = isinstance(value, Tensor)
                form = f"of shape {tuple(value.shape)}" if is_tensor else f"as a {type(value).__name__}"
                raise ValueError(
                    f"{self.name}: its optimizer keeps {key!r} {form} beside a parameter of shape "
                    f"{tuple(self.parameter.shape)}: only tensors of that shape, single numbers and texts can move"
                )
        dtypes = {what: _name_of(tensor.dtype) for what, tensor in sorted(self.tensors.items())}
        return Description(self.name, num_units, dtypes, self._kept())

    def require_dense_gradients(self) -> None:
        """Raise ValueError for a sparse gradient."""
        for what in GRADIENTS:
            if what in self.tensors and self.tensors[what].layout is not torch.strided:
                raise ValueError(f"{self.name}: a gradient of layout {self.tensors[what].layout} cannot move")

    def install(
        self,
        new: Mapping[str, Tensor],
        agreed: Description,
        put: Callable[[], None] | None = None,
    ) -> None:
        """Put other units' tensors in place; parameter, master and state dictionary stay these objects.

        Args:
            put: where this rank holds shards only, gives the parameter the shape of those to come.
        """
        kept = self._kept()  # by the shape that the parameter has now
        if put is not None:
            put()
        state = {key.removeprefix(STATE): tensor for key, tensor in new.items() if key.startswith(STATE)}
        replace_data(self.parameter, new[PARAMETER], new.get(GRADIENT))
        if MASTER in new:
            assert self.stepped is not None
            replace_data(self.stepped, new[MASTER], new.get(MASTER_GRADIENT))
        if self._optimizer is None or self.stepped is None:
            return
        divided = {what.removeprefix(STATE) for what in self.tensors if what.startswith(STATE)}
        if not (agreed.kept or state or kept or divided):
            return
        of_tensor = self._optimizer.state[self.stepped]  # of the optimizer's own kind where there was none
        if agreed.kept != kept or divided != state.keys():  # without units it follows those with some
            of_tensor.clear()
            of_tensor.update(agreed.kept_values(self.stepped.device))
        of_tensor.update({key: with_local(self.stepped, tensor) for key, tensor in state.items()})
        if not of_tensor:
            del self._optimizer.state[self.stepped]

    def install_whole(self, new: Mapping[str, Tensor], plain: Mapping[str, Any], *, requires_grad: bool) -> None:
        """Put another rank's tensors of the whole parameter in place of those there, and its optimizer state.

        Args:
            new: by what they are: PARAMETER, GRADIENT where there is one, and STATE with the key of optimizer state.
            plain: the entries of optimizer state that are no tensors, by key.
        """
        replace_data(self.parameter, new[PARAMETER], None)
        self.parameter.requires_grad_(requires_grad)
        self.parameter.grad = new.get(GRADIENT)
        state = {what.removeprefix(STATE): tensor for what, tensor in new.items() if what.startswith(STATE)}
        set_state(self._optimizer, self.parameter, {**plain, **state})

    def empty(self) -> None:
        """Leave the parameter without elements, gradient and optimizer state, as another rank has them now."""
        replace_data(self.parameter, emptied(self.parameter, self.parameter.device), None)
        set_state(self._optimizer, self.parameter, {})

    @property
    def installed(self) -> list[Tensor]:
        """Return what there is now: the parameter, what the optimizer steps, and its state of the parameter's shape."""
        tensors = [self.parameter]
        if self.stepped is not None:
            tensors.append(self.stepped)
            state = {} if self._optimizer is None else self._optimizer.state.get(self.stepped, {})
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return tensors

    def forget(self) -> None:
        """Let go of the tensors that were there."""
        self.tensors.clear()

    def _kept(self) -> dict[str, list[Any]]:
        """What is one number or text for the whole parameter, as in :attr:`Description.kept`."""
        kept: dict[str, list[Any]] = {}
        for key, kind, value in sorted(self.entries(), key=lambda entry: str(entry[0])):
            if kind is StateKind.NUMBER:
                kept[key] = [_name_of(value.dtype), value.device.type, list(value.shape), value.item()]
            elif kind is StateKind.PLAIN:
                kept[key] = ["", "", [], value]
        return kept


@dataclass
class Description:
    """Describes what one rank holds of a parameter that is divided over ranks.

    Attributes:
        name: of the parameter.
        num_units: how many units it holds there.
        dtypes: of every tensor of the parameter's shape, by what it is: these travel.
        kept: other optimizer state by key, such as Adam's step: a dtype ("" for no tensor), a type of device, a shape
            and a value. It belongs to the whole parameter and does not travel.
    """

    name: str
    num_units: int
    dtypes: dict[str, str] = field(default_factory=dict)
    kept: dict[str, list[Any]] = field(default_factory=dict)

    def dtype(self, what: str) -> torch.dtype:
        """Return the dtype of one of the tensors."""
        return dtype_of(self.dtypes[what])

    def kept_values(self, device: torch.device) -> dict[str, Any]:
        """Return the values that ``kept`` stands for, by key, for a parameter on ``device``."""
        return {key: _kept_value(value, device) for key, value in self.kept.items()}


def agreed_descriptions(of_ranks: Sequence[Sequence[Description]]) -> list[Description]:
    """Return what travels of each parameter, and what is kept, given what every rank holds, [R][number of parameters].

    A rank without units has nothing to lose: it follows the others. A gradient that only some ranks have travels, and
    is zero where there is none.
    """
    agreed = []
    for of_parameter in zip(*of_ranks, strict=True):
        holders = [rank for rank, description in enumerate(of_parameter) if description.num_units]
        first = of_parameter[holders[0]]
        for what, held in (
            ("tensors", [_without_gradients(of_parameter[rank].dtypes) for rank in holders]),
            ("optimizer state", [of_parameter[rank].kept for rank in holders]),
        ):
            groups = alike(held, holders)
            if len(groups) > 1:
                raise RuntimeError(
                    f"units cannot move: the ranks of the group hold different {what} of {first.name}: "
                    f"{by_rank(held, holders)}{at_fault(groups)}"
                )
        dtypes = _without_gradients(first.dtypes)
        for gradient in GRADIENTS:
            kinds = {of_parameter[rank].dtypes[gradient] for rank in holders if gradient in of_parameter[rank].dtypes}
            if len(kinds) > 1:
                raise RuntimeError(f"units cannot move: gradients of {first.name} are of dtypes {sorted(kinds)}")
            if kinds:
                dtypes[gradient] = kinds.pop()
        agreed.append(Description(first.name, 0, dtypes, first.kept))
    return agreed


def set_state(optimizer: torch.optim.Optimizer | None, stepped: Tensor, state: Mapping[str, Any]) -> None:
    """Let the optimizer keep these entries of a tensor that it steps, and nothing else."""
    if optimizer is None:
        return
    optimizer.state.pop(stepped, None)
    if state:
        optimizer.state[stepped].update(state)  # the optimizer's own kind of dictionary


def emptied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return what is in place of a tensor that is on another rank: no elements, in as many dimensions.

    By these users may choose parameter groups.
    """
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=device)


def replace_data(tensor: Tensor, new: Tensor, gradient: Tensor | None) -> None:
    """Give ``tensor`` other data, of another shape, and another gradient; hooks stay, on its gradient accumulator, too.
    Of a DTensor the local parts are given.

    That remembers the shape for as long as anything holds on to it, such as the graph of a loss.
    Torch makes a new one only where dtype or device change: so the dtype changes for a moment.
    """
    if is_dtensor(tensor):  # to autograd it keeps its shape
        if tensor.storage_offset() != new.storage_offset():  # as of a slice of a file, which torch.compile looks at
            tensor.data = with_local(tensor, new)
        set_local_tensor(tensor, new)
        tensor.grad = None if gradient is None else with_local(tensor, gradient)
        return
    hooks = KeptHooks(tensor)
    tensor.grad = None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = new
    tensor.grad = gradient
    hooks.put_on(tensor)


def why_of_fixed_size(name: str, parameter: Tensor, follow: Collection[int] = ()) -> str | None:
    """Return why a parameter must keep its size, as it has a tensor of that size beside it; None where it need not.

    Such a tensor is Megatron's ``main_grad``. Those that ``follow``, by their ``id``, do not count.
    """
    for key, value in vars(parameter).items():
        sizes = {parameter.numel(), local_of(parameter).numel()} - {0, 1}
        if id(value) not in follow and isinstance(value, Tensor) and {value.numel(), local_of(value).numel()} & sizes:
            return (
                f"{name} has an attribute {key!r} of shape {tuple(value.shape)}, as some reducers of gradients put "
                "there, which may be a part of a buffer and would not follow"
            )
    return None


def require_movable_state(optimizer: object | None, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer | None:
    """Return ``optimizer`` itself, if what it keeps for ``parameters`` can follow them to other ranks.

    Raises:
        ValueError: for a wrapper, which may keep master copies or shards elsewhere, for ZeRO, and for an optimizer that
            does not step all parameters that want gradients.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer) or torch_optimizer(optimizer) is not optimizer:
        kind = "only wraps a" if isinstance(optimizer, torch.optim.Optimizer) else "is no"
        raise ValueError(
            f"{type(optimizer).__name__} {kind} torch.optim.Optimizer: layers cannot move with wrappers of optimizers, "
            "which may keep master copies or shards of the parameters"
        )
    if (why := why_sharded(optimizer)) is not None:
        raise ValueError(f"layers cannot move: {why}")
    require_stepping(optimizer, parameters)
    return optimizer


def groups_of(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Return the number of each parameter's group in the optimizer, by the parameter's ``id``."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}


def settings_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return each parameter group's settings as plain values, comparable between ranks."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        {key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        for group in groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return list(map(_plain, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name without ``torch.``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_gradients(dtypes: Mapping[str, str]) -> dict[str, str]:
    return {what: dtype for what, dtype in dtypes.items() if what not in GRADIENTS}


def _kept_value(value: Sequence[Any], device: torch.device) -> Any:
    dtype, device_type, shape, number = value
    if not dtype:
        return number
    where = torch.device("cpu") if device_type == "cpu" else device
    return torch.full(shape, number, dtype=dtype_of(dtype), device=where)
