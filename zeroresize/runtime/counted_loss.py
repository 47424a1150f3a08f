"""A loss as the mean over all that counts in a step, however the step is cut into micro-batches.

A micro-batch's loss is a mean over those of its targets that count, or their sum. How many count is known before the
first backward where the user tells it of the targets, and where the loss is torch's ``cross_entropy`` or another one of
torch, as a function, a module or a ``partial``. Else what a loss gives those when it runs, or its (sum, count), shows
it, and gradients are scaled once after the last backward.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.utils.torch_private import leaves_of

logger = logging.getLogger(__name__)

#: Of outputs and targets: a number, or (sum, count), of which the count is a number or a tensor of one.
Loss = Callable[[Any, Any], Any]
#: Of targets: how many count, a number or a tensor of one.
Count = Callable[[Any], Any]

_CROSS_ENTROPIES = [
    getattr(F, name) for name in ("cross_entropy", "nll_loss", "linear_cross_entropy") if hasattr(F, name)
]
_WEIGHTED_ELEMENTS = F.binary_cross_entropy, F.binary_cross_entropy_with_logits  # their mean is over all elements
_ELEMENTS = F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, *_WEIGHTED_ELEMENTS
_SIGNATURES = {loss: inspect.signature(loss) for loss in (*_CROSS_ENTROPIES, *_ELEMENTS)}
_FUNCTIONS = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}


class CountedLoss(nn.Module):
    """The loss of a micro-batch, as its part of the mean over all that counts.

    :meth:`prepare` and :meth:`begin` come first in each step, then a call for each micro-batch.

    Args:
        loss: of a micro-batch's outputs and targets.
        count: of its targets, how many count, where the user says so.
        averages: whether a number, where nothing is known of it, is the mean over a micro-batch's samples; else the
            sum over its tokens.

    Attributes:
        number: of the next micro-batch; it rises by itself, and may be set.
        total: by which the sums of micro-batches are divided.
        counted, num_unforeseen: what micro-batches have counted in this step, and of how many that was not known
            before: where there are any, gradients and losses are to be multiplied by ``total`` / what counts in all.
        can_be_empty: whether the targets may be such that nothing counts, as far as is known.
        is_foreseen: whether :meth:`prepare` knew what counts.
    """

    def __init__(self, loss: Loss, count: Count | None = None, *, averages: bool) -> None:
        super().__init__()
        self._loss, self._count, self._averages = loss, count, averages
        self._parts: list[tuple[float, bool]] = []  # what each micro-batch counts, and whether the loss is a sum
        self.number, self.total, self.counted, self.num_unforeseen = 0, 1.0, 0.0, 0
        self.can_be_empty, self.is_foreseen, self._is_plain = True, False, False
        self._doubt: str | None = None

    def prepare(self, targets: Sequence[Any], sizes: Sequence[float]) -> list[float]:
        """Return what each of this rank's micro-batches counts in the step.

        Args:
            targets: of the micro-batches.
            sizes: their samples, or tokens, which count where nothing else is known.

        Raises:
            ValueError: for a count that is no number of at least 0.
        """
        self._parts = []
        self.is_foreseen, self.can_be_empty = True, self._count is not None
        for number, (each, size) in enumerate(zip(targets, sizes, strict=True)):
            term = _foreseen(self._loss, each)
            self.is_foreseen &= self._count is not None or term is not None
            self.can_be_empty |= term is not None and term.can_be_empty
            count = size if term is None else term.count
            if self._count is not None:
                try:
                    count = float(self._count(each))
                except Exception as error:
                    kind = type(error).__name__
                    raise ValueError(
                        f"count= fails for the targets of micro-batch {number}: {kind}: {error}"
                    ) from error
            self._parts.append((_checked(count, number), not self._averages if term is None else term.sums))
        self.can_be_empty |= not (self.is_foreseen or self._is_plain)
        return [count for count, _ in self._parts]

    def begin(self, total: float) -> None:
        """Divide the sums of micro-batches by so much from now on, in a step that begins."""
        self.total, self.number, self.counted, self.num_unforeseen = total, 0, 0.0, 0

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        """Return the micro-batch's part of the step's mean, a scalar.

        Raises:
            ValueError: if the loss returns something else than one number, or (sum, count).
        """
        (count, sums), number = self._parts[self.number], self.number
        self.number += 1
        value: Any = None
        if self.is_foreseen and count:
            value = self._loss(outputs, targets)
            value, sums = (value[0], True) if isinstance(value, tuple) else (value, sums)
        elif not self.is_foreseen:
            term = _Term(self._loss(outputs, targets)) if self._is_plain else _watched(self._loss, outputs, targets)
            value = term.value
            if term.count is not None:
                count, sums = _checked(term.count, number), term.sums
                self.num_unforeseen += 1
            elif not self._is_plain:
                self._is_plain, self._doubt = True, self._doubt_of(term)
        self.counted += count
        if not count:  # a mean over nothing would be NaN
            return sum(x.flatten()[:0].sum() for x in leaves_of(outputs) if x.requires_grad) + torch.zeros(())
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss returns {kind}: one number is needed, or (sum, count)")
        return value.reshape(()) * ((1.0 if sums else count) / self.total)

    def warn(self) -> None:
        """Warn once, where numbers of which nothing is known are probably not what they are taken for."""
        if self._doubt is not None:
            logger.warning("%s", self._doubt)
        self._doubt = None

    def _doubt_of(self, term: _Term) -> str | None:
        modules = self._loss.modules() if isinstance(self._loss, nn.Module) else []
        if term.ignores or any(hasattr(module, "ignore_index") for module in modules):
            reason = "ignores targets, in a way that is not recognised"
        elif self._averages and "Mean" in str(getattr(term.value, "grad_fn", "")):
            return None
        else:
            reason = "returns a number of which nothing else is known"
        taken = "the mean over a micro-batch's samples" if self._averages else "the sum over all tokens"
        return f"the loss {reason}; it is taken for {taken}. Return (sum, count), or give count=, a function of targets"


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply those there are in place, unless by 1."""
    for parameter in parameters if factor != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def total_count(counts: Iterable[float]) -> float:
    """Return what counts in a step, of the counts of each rank; a ValueError where that is nothing."""
    total = sum(counts)
    if not 0.0 < total < math.inf:
        raise ValueError(
            f"what counts in the loss of the whole batch is {total:g}, so there is no mean: all targets are ignored or "
            "have weight 0. Leave the batch out, on all ranks"
        )
    return total


class _Term(NamedTuple):
    """What a loss has returned: of so much that counts the sum or the mean; the count is None where it is not known."""

    value: Any
    count: Any = None
    sums: bool = True
    can_be_empty: bool = True
    ignores: bool = False


class _Watch(TorchFunctionMode):
    """Keeps the calls of torch's losses, and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, inspect.BoundArguments]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIGNATURES:
            self.calls.append((result, func, _SIGNATURES[func].bind(*args, **(kwargs or {}))))
        return result


def _watched(loss: Loss, outputs: Any, targets: Any) -> _Term:
    with _Watch() as watch:
        value = loss(outputs, targets)
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(count, Tensor) and count.requires_grad:
            raise ValueError("loss returns (sum, count) of which the count has a gradient: is it (count, sum)?")
        return _Term(total, count)
    ignores = False
    for result, func, given in watch.calls:
        term = _term_of(value, func, given)
        if result is value or (len(watch.calls) == 1 and _is_multiple(value, result)):
            return term
        ignores |= term.ignores
    return _Term(value, ignores=ignores)


def _is_multiple(value: Any, loss: Any) -> bool:
    """Whether a scalar is another one times a number, such as the scale of a gradient scaler."""
    made_by = getattr(value, "grad_fn", None)
    inputs = [each for each, _ in made_by.next_functions] if made_by is not None else []
    is_scaled = made_by is not None and made_by.name() in ("MulBackward0", "DivBackward0") and value.numel() == 1
    return is_scaled and inputs[0] is loss.grad_fn and not any(inputs[1:])


def _term_of(value: Any, func: Any, given: inspect.BoundArguments) -> _Term:
    """Of a call of one of torch's losses."""
    given.apply_defaults()
    values = given.arguments
    target, weight, ignore_index = values["target"], values.get("weight"), values.get("ignore_index", -100)
    if values.get("reduce") is False or values["reduction"] not in ("mean", "sum"):
        return _Term(value, ignores=func in _CROSS_ENTROPIES and bool((target == ignore_index).any()))
    sums = values["reduction"] == "sum" if values.get("size_average") is None else not values["size_average"]
    if func in _ELEMENTS:
        is_plain = weight is None or func in _WEIGHTED_ELEMENTS
        return _Term(value, target.numel() if is_plain else None, sums, can_be_empty=False)
    if target.is_floating_point():  # probabilities of classes, whose mean is over samples whatever the weights
        return _Term(value, target.numel() / target.shape[min(target.dim(), 2) - 1], sums, can_be_empty=False)
    counts = target != (-100 if ignore_index is None else ignore_index)
    count = counts.sum()
    if weight is not None:  # torch divides by them with label smoothing, too
        count = weight.detach().double()[target[counts].to(weight.device)].sum()
    return _Term(value, count, sums, ignores=not bool(counts.all()))


def _foreseen(loss: Loss, targets: Any) -> _Term | None:
    """What the targets alone tell of one of torch's losses; None for others."""
    settings: Mapping[str, Any] = {}
    function: Any = loss
    if isinstance(loss, functools.partial) and not loss.args:
        function, settings = loss.func, loss.keywords
    elif type(loss) in _FUNCTIONS:
        function = _FUNCTIONS[type(loss)]
        names = _SIGNATURES[function].parameters
        settings = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    if function not in _FUNCTIONS.values() or not isinstance(targets, Tensor):
        return None
    term = _term_of(None, function, _SIGNATURES[function].bind(None, targets, **settings))
    return None if term.count is None else term._replace(count=float(term.count))


def _checked(count: Any, number: int) -> float:
    value = float(count)
    if not value >= 0.0:
        raise ValueError(f"what counts in micro-batch {number} is {value}: a number of at least 0 is needed")
    return value
