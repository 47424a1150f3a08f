"""What a forward does on each rank: what modules read and return, what draws random numbers, what cuts features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.checks.cut_features import CutFeatures
from zeroresize.checks.divided import kind_of_layer
from zeroresize.checks.replicated import distance_of_sums, sums_of
from zeroresize.layers.local_parts import local_of
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.fingerprint import fingerprint

#: Of each tensor, or other value, in what a module reads or returns: its shape, and three sums.
Numbers = list[list[Any]]


@dataclass(frozen=True)
class Event:
    """What happened once in a forward: a module was called, or a function drew random numbers.

    Attributes:
        module: its name, or of the innermost module that was running.
        operation: the function's name; empty for a module.
        inputs, outputs: of every rank.
    """

    module: str
    operation: str
    inputs: Sequence[Numbers]
    outputs: Sequence[Numbers]

    def is_alike(self, numbers: Sequence[Numbers], tolerance: float) -> bool:
        return all(are_alike(of_rank, numbers[0], tolerance) for of_rank in numbers)

    @property
    def is_divided(self) -> bool:
        """Whether it returns less than it reads along one dimension, as what scatters a sequence does."""
        shapes, before = [row[0] for row in self.outputs[0]], [row[0] for row in self.inputs[0]]
        return any(
            len(after) == len(shape) and sum(map(int.__ne__, after, shape)) == 1 and sum(after) < sum(shape)
            for after in shapes
            for shape in before
        )


class Recorder(TorchFunctionMode):
    """Records the forwards of a model while its block lasts, but for what a backward computes again.

    Attributes:
        events: of this rank, as what :class:`Event` takes.
        rows: for each row-parallel layer, or divided embedding, what it reads and returns in its first call,
            and whether that is within a tuple.
        gradients: numbers of what modules read ("input") and return ("output"), and of its gradient.
        cuts: for each column-parallel layer whose output's features were cut, by which function.
        loss: the name of the last function that computes a loss.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self._model, self._ranks = model, ranks
        self._running: list[tuple[str, Numbers]] = []
        self._calls: Counter[str] = Counter()
        self.events: list[tuple[str, str, str, Numbers, Numbers]] = []
        self.rows: dict[str, tuple[Tensor, Tensor | None, bool]] = {}
        self.gradients: dict[str, tuple[Numbers, Numbers]] = {}
        self.loss = "loss"
        self._features = CutFeatures()
        self.cuts = self._features.cuts
        self.is_on = True

    def __enter__(self) -> Any:
        self._handles = []
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True, with_kwargs=True),
                module.register_forward_hook(partial(self._end, name), with_kwargs=True),
            ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_on:
            return None
        self.is_on = False
        if kind_of_layer(module):
            self._ranks.arrive(name)
        if args and isinstance(args[0], Tensor) and kind_of_layer(module) == "column":
            args = args[0].view_as(args[0]), *args[1:]  # whose gradient is what this layer hands on
        self._note_gradients(f"{name} input", (args, kwargs))
        self._running.append((name, numbers_in((args, kwargs))))
        if kind_of_layer(module) in ("row", "embedding") and name not in self.rows:
            first = next(tensors_in((args, kwargs)), None)
            if first is not None:
                self.rows[name] = first.detach().clone(), None, False
        self.is_on = True
        return args, kwargs

    def _end(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.is_on or not self._running:
            return
        self.is_on = False
        name, inputs = self._running.pop()
        self._note(name, "", inputs, numbers_in(output))
        self._note_gradients(f"{name} output", output)
        if name in self.rows and self.rows[name][1] is None:
            y = next(tensors_in(output), None)
            if y is not None:
                self.rows[name] = self.rows[name][0], y.detach().clone(), isinstance(output, tuple)
        if kind_of_layer(module) == "column":
            self._features.begin(name, module, output)
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self.is_on or name == "__get__":
            return func(*args, **kwargs)
        before = self._random_states()
        output = func(*args, **kwargs)
        self.is_on = False
        if kwargs.get("generator") is not None or any(map(_differ, before, self._random_states())):
            self._note(
                self._running[-1][0] if self._running else "",
                name,
                numbers_in(list(tensors_in((args, kwargs)))),
                numbers_in(output),
            )
        if "loss" in name or "cross_entropy" in name:
            self.loss = name
        self._features.follow(name, args, kwargs, output)
        self.is_on = True
        return output

    def _random_states(self) -> list[Tensor]:
        device = self._ranks.device
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

    def _note(self, module: str, operation: str, inputs: Numbers, outputs: Numbers) -> None:
        key = f"{module} {operation}"
        self._calls[key] += 1
        self.events.append((f"{key} {self._calls[key]}", module, operation, inputs, outputs))

    def _note_gradients(self, key: str, values: Any) -> None:
        def note(gradient: Tensor) -> None:
            was_on, self.is_on = self.is_on, False
            self.gradients[key] = numbers, numbers_in(gradient)
            self.is_on = was_on

        tensor = next((one for one in tensors_in(values) if one.requires_grad and not one.is_leaf), None)
        if tensor is not None and key not in self.gradients:
            numbers = numbers_in(tensor)
            self.gradients[key] = numbers, []  # in the order of the forward
            tensor.register_hook(note)

    def events_of_ranks(self) -> list[Event]:
        """Return what happened on all ranks, in the order of the first; collective."""
        tables = [{key: rest for key, *rest in of_rank} for of_rank in self._ranks.share(self.events)]
        everywhere = [key for key in tables[0] if all(key in table for table in tables)]
        return [
            Event(
                tables[0][key][0],
                tables[0][key][1],
                [table[key][2] for table in tables],
                [table[key][3] for table in tables],
            )
            for key in everywhere
        ]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


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


def _differ(state: Tensor, other: Tensor) -> bool:
    return not torch.equal(state, other)
