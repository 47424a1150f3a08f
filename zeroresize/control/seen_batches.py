"""What enters a model, in a few sums: ranks of a group that are given other batches train something else."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroresize.checks.replicated import distance_of_sums, sums_of
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import alike, at_fault

#: About so many tokens of a layer's input are looked at, evenly spread.
_MOST_TOKENS = 256
#: Of its norm: what the ranks' inputs of a layer may differ by in sum, at least, and in machine epsilons.
_TOLERANCE, _ROUNDINGS = 1e-3, 8.0
#: The same behind products, which some devices compute in TF32.
_TOLERANCE_WITHIN = 1e-2
#: Sums of whole numbers are taken modulo this, so that many of them add up exactly in float64.
_MODULUS = 2**40
#: Whether a difference is a mistake of batches: surely; unless random draws differ; unless it is meant; or it is one
#: within the model.
_SURELY, _UNLESS_DRAWN, _UNLESS_MEANT, _WITHIN = range(4)
_REMEDIES = ", and draw alike what is random before the layers", "; all is well if each rank is meant to have its own"


class Difference(NamedTuple):
    """What the ranks of a group do not have alike."""

    batches: str  # an error's text about batches; empty where those are alike
    is_certain: bool  # that it is a mistake
    only_warns: bool  # as it may be meant
    within: tuple[str, ...]  # inputs of layers that differ


class SeenBatches:
    """Sums up what all ranks of a group should have alike, until they compare it.

    Of the model's inputs that are the whole numbers, such as token ids, unless each rank is given its part of the
    sequences; and what column-parallel layers multiply, which all ranks have whole. ``first`` names the layer that
    begins a forward.

    Attributes:
        is_due: whether the ranks compare soon, as they do at the start, so that forwards are looked at.
        rounding: what sums may differ by in the precision in which the layer multiplies, of a norm.
    """

    def __init__(self, model: nn.Module, first: str, num_ranks: int) -> None:
        self.is_due, self.rounding = True, 0.0
        self._model, self._first, self._num_ranks = weakref.ref(model), first, num_ranks
        #: Sums, of how many elements, what is rounding, and whether a difference is a mistake.
        self._seen: dict[str, tuple[Tensor, int, float, int]] = {}
        self._taken: dict[float, tuple[str, float, int]] = {}
        self._inputs: list[tuple[str, Tensor]] = []  # of the model, until the layer tells how many tokens there are
        self.unhook = model.register_forward_pre_hook(self._model_begins, with_kwargs=True).remove

    def __deepcopy__(self, memo: object) -> SeenBatches:
        return self  # which looks at no copy of the model

    def __getstate__(self) -> dict[str, Any]:
        return {}  # its layers tell that a model is not to be pickled

    def layer_begins(self, name: str, layer: BalancedLinear, x: Tensor) -> None:
        """Look at what a layer is called with, [..., K]."""
        if self._looks:
            num_tokens = x.shape[:-1].numel()
            for label, numbers in self._inputs:
                if numbers.numel() * self._num_ranks != num_tokens:  # else a rank's part of the sequences
                    doubt = _SURELY if numbers.numel() == num_tokens else _UNLESS_MEANT
                    self._add(label, numbers, _placed_sums(numbers), 0.0, doubt)
            if layer.is_column_parallel and x.is_floating_point():
                self.rounding = _ROUNDINGS * torch.finfo(x.dtype).eps
                some = x.reshape(-1, x.shape[-1])[:: max(1, num_tokens // _MOST_TOKENS)]
                is_first = name == self._first
                tolerance = max(_TOLERANCE if is_first else _TOLERANCE_WITHIN, self.rounding)
                self._add(f"the input of {name}", x, sums_of(some), tolerance, _UNLESS_DRAWN if is_first else _WITHIN)
        self._inputs.clear()

    def take(self) -> list[float]:
        """Return what was seen since the last call: for each a key and three sums."""
        self._taken = {
            fingerprint(f"{name} {size} {doubt}"): (name, least, doubt)
            for name, (_, size, least, doubt) in self._seen.items()
        }
        rows = [sums.tolist() for sums, *_ in self._seen.values()]
        self._seen.clear()
        return [number for key, row in zip(self._taken, rows, strict=True) for number in (key, *row)]

    def difference(self, tables: Sequence[Mapping[float, Sequence[float]]]) -> Difference:
        """Compare what the ranks have taken, by key."""
        differing: list[str] = []
        within: list[str] = []
        doubts = set[int]()
        for key, (name, tolerance, doubt) in self._taken.items():
            if all(key in table for table in tables):  # else of other sizes, which layers compare
                groups = alike([distance_of_sums(table[key], tables[0][key]) > tolerance for table in tables])
                text = f"{name}{at_fault(groups)}"
                if len(groups) > 1 and doubt in (_UNLESS_DRAWN, _WITHIN):
                    within.append(text)
                if len(groups) > 1 and doubt != _WITHIN:
                    differing.append(text)
                    doubts.add(doubt)
        is_certain, only_warns = _SURELY in doubts, doubts == {_UNLESS_MEANT}
        remedy = "" if is_certain else _REMEDIES[only_warns]
        text = (
            f"the ranks of the group were given different batches: they differ in {', '.join(differing)}; every rank "
            "of a tensor-parallel group must be given the same batch (samplers divide them over data-parallel ranks "
            f"only){remedy}"
        )
        return Difference(text if differing else "", is_certain, only_warns, tuple(within))

    def _model_begins(self, model: nn.Module, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or not model.training or model is not self._model():  # but a copy
            return
        given: dict[Any, Any] = {**dict(enumerate(inputs)), **named_inputs}
        self._inputs = list(_whole_numbers(given, "input ")) if self._looks else []

    @property
    def _looks(self) -> bool:
        return self.is_due and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    def _add(self, name: str, tensor: Tensor, sums: Tensor, tolerance: float, doubt: int) -> None:
        before, size, *_ = self._seen.get(name, (torch.zeros_like(sums), 0))
        self._seen[name] = before.to(sums.device) + sums, size + tensor.numel(), tolerance, doubt


def _whole_numbers(inputs: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of integers and flags among inputs, by name; none that only stand for others, as while tracing."""
    for name, value in inputs.items():
        if isinstance(value, Mapping | list | tuple):
            inner = value if isinstance(value, Mapping) else dict(enumerate(value))
            yield from _whole_numbers(inner, f"{prefix}{name} ")
        elif type(value) is Tensor and not (value.is_floating_point() or value.is_complex() or value.is_meta):
            yield f"{prefix}{name}", value


def _placed_sums(numbers: Tensor) -> Tensor:
    """[3] in float64, which other numbers, or the same in other places, hardly have."""
    flat = numbers.detach().reshape(-1).to(torch.int64)
    places = torch.arange(1, len(flat) + 1, device=flat.device)
    sums = torch.stack([flat.sum(), (flat * places).sum(), (flat * places * places).sum()])
    return sums.remainder(_MODULUS).double() + 1.0
