"""What belongs to a parameter that holds units, and travels with them: gradients, master weight, optimizer state.

Ranks must send each other equally much, so they agree on it first, each from a :class:`Description` of what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.layers.weight_checks import is_sharded
from zeroresize.optim.optimizers import stepped_tensors, torch_optimizer
from zeroresize.resharding.accumulator_hooks import KeptHooks

PARAMETER, GRADIENT, MASTER, MASTER_GRADIENT, STATE = "parameter", "gradient", "master", "master gradient", "state "
GRADIENTS = (GRADIENT, MASTER_GRADIENT)


@dataclass
class Description:
    """What one rank holds of a parameter.

    Attributes:
        name: of the parameter.
        num_units: how many units it holds there.
        dtypes: of every tensor of the parameter's shape, by what it is: these travel.
        kept: other optimizer state by key, such as Adam's step: a dtype ("" for no tensor), a type of device, a shape
            and a value. It belongs to all units and does not travel.
    """

    name: str
    num_units: int
    dtypes: dict[str, str] = field(default_factory=dict)
    kept: dict[str, list[Any]] = field(default_factory=dict)


class Contents:
    """A parameter that holds units, with all that belongs to it on this rank.

    Args:
        unit_tensor: where the parameter is.
        num_units: how many units it holds.
        parameter: the parameter itself.
        stepped: what the optimizer updates for it, itself or its master copy; None if nothing.
        optimizer: the torch optimizer; None without one.

    Attributes:
        description: see :class:`Description`.

    Raises:
        ValueError: if the parameter's shape is not that of its units, or its optimizer keeps state that cannot move.
    """

    def __init__(
        self,
        unit_tensor: UnitTensor,
        num_units: int,
        parameter: Tensor,
        stepped: Tensor | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.unit_tensor, self.num_units, self.parameter = unit_tensor, num_units, parameter
        self.stepped, self._optimizer = stepped, optimizer
        name, dim = unit_tensor.name, unit_tensor.dim
        size = unit_tensor.num_blocks * num_units * unit_tensor.rows
        if dim >= parameter.dim() or parameter.shape[dim] != size:
            raise ValueError(
                f"{name}: its shape is {tuple(parameter.shape)}, but dimension {dim} must be {size}: "
                f"{unit_tensor.num_blocks} blocks of {num_units} units of {unit_tensor.rows} rows"
            )
        if is_sharded(parameter):
            raise ValueError(
                f"{name}: it is a DTensor, of which this rank holds a shard only, as with fully_shard, so its units "
                "cannot move"
            )
        if not parameter.is_leaf:
            raise ValueError(f"{name}: it is computed from other tensors (is_leaf is False), so its units cannot move")
        if reason := why_of_fixed_size(name, parameter):
            raise ValueError(f"{reason}, so its units cannot move")
        self._state: Mapping[str, Any] = {}
        if optimizer is not None and stepped is not None and stepped in optimizer.state:
            self._state = optimizer.state[stepped]
        self._tensors: dict[str, Tensor] = {PARAMETER: parameter.detach()}
        self._add_gradient(GRADIENT, parameter)
        if stepped is not None and stepped is not parameter:
            self._tensors[MASTER] = stepped.detach()
            self._add_gradient(MASTER_GRADIENT, stepped)
        self.description = Description(name, num_units)
        for key in sorted(self._state, key=str):
            self._add_state(key, self._state[key])
        self.description.dtypes = {what: str(tensor.dtype)[6:] for what, tensor in sorted(self._tensors.items())}

    @property
    def name(self) -> str:
        return self.unit_tensor.name

    def tensor(self, what: str) -> Tensor | None:
        """The tensor that is called so in ``description.dtypes``; None if this rank has none."""
        return self._tensors.get(what)

    def device_of(self, what: str) -> torch.device:
        """Where that tensor is, or would be."""
        tensor = self._tensors.get(what)
        if tensor is None:
            is_of_optimizer = what not in (PARAMETER, GRADIENT) and self.stepped is not None
            tensor = self.stepped if is_of_optimizer else self.parameter
        assert tensor is not None
        return tensor.device

    def install(self, new: Mapping[str, Tensor], agreed: Description) -> None:
        """Put tensors of another number of units in place of those there; parameters stay the objects they are."""
        state = {key.removeprefix(STATE): tensor for key, tensor in new.items() if key.startswith(STATE)}
        replace_data(self.parameter, new[PARAMETER], new.get(GRADIENT))
        if MASTER in new:
            assert self.stepped is not None
            replace_data(self.stepped, new[MASTER], new.get(MASTER_GRADIENT))
        if self._optimizer is None or self.stepped is None:
            return
        own = {what.removeprefix(STATE) for what in self._tensors if what.startswith(STATE)}
        if not (agreed.kept or state or self.description.kept or own):
            return
        of_tensor = self._optimizer.state[self.stepped]  # one of the optimizer's own kind where there was none
        if agreed.kept != self.description.kept or own != state.keys():  # without units it follows those with some
            of_tensor.clear()
            for key, value in agreed.kept.items():
                of_tensor[key] = kept_value(value, self.stepped.device)
        of_tensor.update(state)
        if not of_tensor:
            del self._optimizer.state[self.stepped]

    def forget(self) -> None:
        """Let go of the tensors that were there."""
        self._tensors.clear()

    def _add_gradient(self, what: str, of: Tensor) -> None:
        if of.grad is None:
            return
        if of.grad.layout is not torch.strided:
            raise ValueError(f"{self.name}: its gradient is of layout {of.grad.layout}, so its units cannot move")
        self._tensors[what] = of.grad.detach()

    def _add_state(self, key: str, value: Any) -> None:
        assert self.stepped is not None
        if isinstance(value, Tensor):
            # With one element, the step is of the parameter's shape by accident.
            if value.shape == self.stepped.shape and not (key == "step" and value.numel() == 1):
                self._tensors[STATE + key] = value
                return
            if value.numel() == 1:
                kept = [str(value.dtype)[6:], value.device.type, list(value.shape), value.item()]
                self.description.kept[key] = kept
                return
            if self.num_units == 0:  # nobody's state: this rank follows those that have units
                return
            raise ValueError(
                f"{self.name}: its optimizer keeps {key!r} of shape {tuple(value.shape)} beside a parameter of shape "
                f"{tuple(self.stepped.shape)}: units can move only with single numbers and tensors of that shape"
            )
        if not isinstance(value, bool | int | float | str | None):
            raise ValueError(
                f"{self.name}: its optimizer keeps {key!r} as a {type(value).__name__}, so its units cannot move"
            )
        self.description.kept[key] = ["", "", [], value]


def contents_of(segment: OwnedSegment, optimizer: Any, rank: int) -> list[Contents]:
    """What ``rank``, this one, holds of a segment; a parameter that is there twice counts once.

    Raises:
        ValueError: as :class:`Contents` does; for one parameter in two roles; for master weights of another shape.
    """
    found: dict[int, UnitTensor] = {}
    for one in segment.tensors:
        known = found.setdefault(id(one.parameter), one)
        if (known.dim, known.rows, known.num_blocks) != (one.dim, one.rows, one.num_blocks):
            raise ValueError(f"{one.name} and {known.name} are one parameter, but hold different units")
    parameters = {one.name: one.parameter for one in found.values()}
    stepped: Mapping[str, Tensor] = {}
    inner = None
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        stepped = stepped_tensors(optimizer, parameters)
    num_units = segment.owned.counts[rank]
    return [Contents(one, num_units, one.parameter, stepped.get(one.name), inner) for one in found.values()]


def as_json(descriptions: Sequence[Description], *, with_units: bool) -> str:
    """The same text for the same descriptions; units may be left out, since ranks may differ in them."""
    plain = [asdict(one) for one in descriptions]
    for one in plain if not with_units else ():
        del one["num_units"]
    return json.dumps(plain, sort_keys=True)


def from_json(text: str) -> list[Description]:
    return [Description(**one) for one in json.loads(text)]


def agreed_contents(by_rank: Sequence[Sequence[Description]]) -> list[Description]:
    """What travels of each parameter, and what is kept, after every rank has told what it holds.

    A rank without units has nothing to lose: it follows the others. A gradient that only some ranks have travels, and
    is zero where there is none.

    Args:
        by_rank: [R][number of parameters], all in one order.

    Raises:
        RuntimeError: if ranks that have units differ in optimizer state, such as the number of steps: no rank could
            then hold units of both.
    """
    agreed = []
    for of_one in zip(*by_rank, strict=True):
        holders = [rank for rank, one in enumerate(of_one) if one.num_units]
        first = of_one[holders[0]]
        for rank in holders[1:]:
            other = of_one[rank]
            for what, one, another in (
                ("tensors", _without_gradients(first.dtypes), _without_gradients(other.dtypes)),
                ("optimizer state", first.kept, other.kept),
            ):
                if one != another:
                    raise RuntimeError(
                        f"units cannot move: ranks {holders[0]} and {rank} of the group hold different {what} of "
                        f"{first.name}: {one} and {another}"
                    )
        dtypes = _without_gradients(first.dtypes)
        for gradient in GRADIENTS:
            found = {one.dtypes[gradient] for one in of_one if one.num_units and gradient in one.dtypes}
            if len(found) > 1:
                raise RuntimeError(f"units cannot move: gradients of {first.name} are of dtypes {sorted(found)}")
            if found:
                dtypes[gradient] = found.pop()
        agreed.append(Description(first.name, 0, dtypes, first.kept))
    return agreed


def _without_gradients(dtypes: Mapping[str, str]) -> dict[str, str]:
    return {what: dtype for what, dtype in dtypes.items() if what not in GRADIENTS}


def kept_value(value: Sequence[Any], device: torch.device) -> Any:
    """What an entry of ``Description.kept`` stands for."""
    dtype, device_type, shape, number = value
    if not dtype:
        return number
    where = torch.device("cpu") if device_type == "cpu" else device
    return torch.full(shape, number, dtype=getattr(torch, dtype), device=where)


def replace_data(tensor: Tensor, new: Tensor, gradient: Tensor | None) -> None:
    """Give ``tensor`` other data, of another shape, and another gradient; hooks stay, on its gradient accumulator, too.

    That remembers the shape for as long as anything holds on to it, such as the graph of a loss.
    Torch makes a new one only where dtype or device change: so the dtype changes for a moment.
    """
    hooks = KeptHooks(tensor)
    tensor.grad = None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = new
    tensor.grad = gradient
    hooks.put_on(tensor)


def why_of_fixed_size(name: str, parameter: Tensor) -> str | None:
    """Why a parameter must keep its size: somebody has put a tensor of it beside, as Megatron's ``main_grad``."""
    for key, value in vars(parameter).items():
        if isinstance(value, Tensor) and value.numel() == parameter.numel() > 1:
            return (
                f"{name} has an attribute {key!r} of shape {tuple(value.shape)}, as some reducers of gradients put "
                "there, which may be a part of a buffer and would not follow"
            )
    return None


def layers_of(segment: OwnedSegment) -> list[nn.Module]:
    """The modules that hold the segment's parameters, each once."""
    return list({id(one.owner): one.owner for one in segment.tensors}.values())
