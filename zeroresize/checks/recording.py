"""What a forward does on each rank: what modules read and return, what draws random numbers, what cuts features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.checks.divided import kind_of_layer
from zeroresize.checks.replicated import distance_of_sums, sums_of
from zeroresize.integrations.known_modules import is_elementwise_function
from zeroresize.integrations.packed_layers import block_in
from zeroresize.layers.local_parts import local_of
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_private import storage_id
from zeroresize.utils.torch_state import tensors_in

#: Of each tensor, or other value, in what a module reads or returns: its shape, and three sums.
Numbers = list[list[Any]]


@dataclass(frozen=True)
class Event:
    """What happened once in a forward: a module was called, or a function (``operation``) in it drew random numbers.

    ``inputs`` and ``outputs`` are those of every rank.
    """

    module: str
    operation: str
    inputs: Sequence[Numbers]
    outputs: Sequence[Numbers]

    def parts_ways(self, tolerance: float) -> bool:
        """Whether what reads the same on all ranks returns other values of one shape, and scatters nothing."""
        shapes, before = [row[0] for row in self.outputs[0]], [row[0] for row in self.inputs[0]]
        is_scattered = any(
            len(after) == len(shape) and sum(map(int.__ne__, after, shape)) == 1 and sum(after) < sum(shape)
            for after in shapes
            for shape in before
        )
        is_alike = are_all_alike(self.inputs, tolerance) and not are_all_alike(self.outputs, tolerance)
        return bool(shapes) and any(before) and is_alike and not is_scattered


class Recorder(TorchFunctionMode):
    """Records the forwards of a model while its block lasts, but for what a backward computes again.

    By layer: ``rows`` has what row-parallel ones read and return first, and whether that is in a tuple; ``blocks`` into
    which blocks functions cut the output of column-parallel ones. ``loss`` is the last function that computes a loss.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self._model, self._ranks = model, ranks
        self._running: list[tuple[str, Numbers]] = []
        self._calls: Counter[str] = Counter()
        self.events: dict[str, tuple[str, str, Numbers, Numbers]] = {}
        self.rows: dict[str, tuple[Tensor, Tensor, bool]] = {}
        self.loss = "loss"
        self.blocks: dict[str, dict[tuple[int, int], str]] = {}
        #: By storage the layer whose features it holds, their number, and a tensor that keeps it.
        self._followed: dict[int, tuple[str, int, Tensor]] = {}
        self._is_on = True

    def __enter__(self) -> Any:
        for name, module in self._model.named_modules():  # Apart.forward() takes hooks off again
            module.register_forward_pre_hook(partial(self._begin, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._end, name), with_kwargs=True)
        return super().__enter__()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_on:
            self._is_on = False
            if kind_of_layer(module):
                self._ranks.arrive(name)
            self._running.append((name, numbers_in((args, kwargs))))
            self._is_on = True

    def _end(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._is_on or not self._running:
            return
        self._is_on = False
        name, inputs = self._running.pop()
        self._note(name, "", inputs, numbers_in(output))
        x, y = (next(tensors_in(value), None) for value in ((args, kwargs), output))
        kind = kind_of_layer(module)
        if kind == "row" and name not in self.rows and x is not None and y is not None:
            self.rows[name] = x.detach().clone(), y.detach().clone(), isinstance(output, tuple)
        if kind == "column" and "Fused" not in type(module).__name__ and y is not None:
            rows: int = local_of(module.weight).shape[0]  # type: ignore[arg-type]
            if local_of(y).shape[-1] == rows:  # not gathered
                self._followed[_storage_of(y)] = name, rows, y
        self._is_on = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self._is_on or name == "__get__":
            return func(*args, **kwargs)
        before = self._random_states()
        output = func(*args, **kwargs)
        self._is_on = False
        if kwargs.get("generator") is not None or not all(map(torch.equal, before, self._random_states())):
            module = self._running[-1][0] if self._running else ""
            self._note(module, name, numbers_in(list(tensors_in((args, kwargs)))), numbers_in(output))
        if "loss" in name or "cross_entropy" in name:
            self.loss = name
        self._follow(name.strip("_"), args, output)
        self._is_on = True
        return output

    def _follow(self, name: str, args: Any, output: Any) -> None:
        """See whether a function cuts the features of a column-parallel layer, or computes each by itself."""
        x = next((each for each in tensors_in(args) if _storage_of(each) in self._followed), None)
        if x is None:
            return
        layer, size, _ = self._followed[_storage_of(x)]
        for y in tensors_in(output):
            if _storage_of(y) == _storage_of(x):
                block = block_in(local_of(y), local_of(x), size)
                if block is not None and block != (0, size):
                    self.blocks.setdefault(layer, {}).setdefault(block, name)
            elif is_elementwise_function(name) and (y.shape, y.stride()) == (x.shape, x.stride()):
                self._followed[_storage_of(y)] = layer, size, y
            elif name == "glu":
                halves = (0, size // 2), (size // 2, size)
                self.blocks.setdefault(layer, {}).update(dict.fromkeys(halves, name))

    def _random_states(self) -> list[Tensor]:
        device = self._ranks.device
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

    def _note(self, module: str, operation: str, inputs: Numbers, outputs: Numbers) -> None:
        key = f"{module} {operation}"
        self._calls[key] += 1
        self.events[f"{key} {self._calls[key]}"] = module, operation, inputs, outputs

    def events_of_ranks(self) -> list[Event]:
        """Return what happened on all ranks, in the order of the first; collective."""
        tables = self._ranks.share(self.events)
        rows = [[table[key] for table in tables] for key in tables[0] if all(key in table for table in tables)]
        return [Event(*of_ranks[0][:2], *([row[at] for row in of_ranks] for at in (2, 3))) for of_ranks in rows]


def _storage_of(tensor: Tensor) -> int:
    return storage_id(local_of(tensor))


@torch.no_grad()
def numbers_in(value: Any) -> Numbers:
    """Return the shape and sums of each tensor in containers, and a mark of every other plain value."""
    if isinstance(value, Tensor):
        local = local_of(value).detach()
        if local.is_floating_point() and local.numel():
            return [[list(local.shape), *sums_of(local).tolist()]]
        value = local.tolist() if not local.is_complex() else torch.view_as_real(local).tolist()
        return [[list(local.shape), *_mark(value)]]
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return [row for each in inner for row in numbers_in(each)]
    return [[[], *_mark(value)]] if isinstance(value, bool | int | float | str) else []


def _mark(value: Any) -> tuple[float, float, float]:
    mark = fingerprint(repr(value))
    return mark, mark, 1.0


def are_alike(numbers: Numbers, others: Numbers, tolerance: float) -> bool:
    """Tell whether two ranks have the same tensors and values, but for rounding."""
    return len(numbers) == len(others) and all(
        row[0] == other[0] and distance_of_sums(row[1:], other[1:]) <= tolerance
        for row, other in zip(numbers, others, strict=True)
    )


def are_all_alike(of_ranks: Sequence[Numbers], tolerance: float) -> bool:
    """Tell whether all ranks have what the first one has."""
    return all(are_alike(numbers, of_ranks[0], tolerance) for numbers in of_ranks)
