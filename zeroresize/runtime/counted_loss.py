"""A loss as the mean over all that counts in a step, however the step is cut into micro-batches.

A micro-batch's loss is a mean over those of its targets that count, or their sum. How many count is known before the
first backward where the targets tell: a loss that keeps nothing from call to call is called with them and a stand-in
for the outputs, and what it gives ``cross_entropy``, or another loss of torch, shows which of them count. Else what it
gives that when it runs, or its (sum, count), shows it, and gradients are scaled once after the last backward.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.utils.torch_private import leaves_of, map_leaves

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
#: What may be read of a loss that is called more often than asked for, and what its code may not do.
_SETTINGS = int, float, complex, str, tuple, Tensor, types.ModuleType, torch.dtype, torch.device
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "DELETE_GLOBAL", "DELETE_DEREF")
_REAL = {Tensor.dtype.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]


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
        can_be_empty: whether the targets may be such that nothing counts.
        is_foreseen: whether :meth:`prepare` knew what counts; None before the first one.
        is_plain: whether the loss has returned numbers of which nothing is known.
    """

    def __init__(self, loss: Loss, count: Count | None = None, *, averages: bool) -> None:
        super().__init__()
        self._loss, self._count, self._averages = loss, count, averages
        self._parts: list[tuple[float, bool]] = []
        self.number, self.total, self.counted, self.num_unforeseen = 0, 1.0, 0.0, 0
        self.can_be_empty, self.is_plain = count is not None, False
        self.is_foreseen: bool | None = None
        self._may_be_tried = _keeps_nothing(loss)
        self._doubt: str | None = None

    def prepare(self, targets: Sequence[Any], sizes: Sequence[float]) -> list[float]:
        """Return what each of this rank's micro-batches counts in the step.

        Args:
            targets: of the micro-batches.
            sizes: their samples, or tokens, which count where nothing else is known.

        Raises:
            ValueError: for a count that is no number of at least 0, and where some micro-batches tell what counts and
                others do not.
        """
        self._parts = []
        for number, (each, size) in enumerate(zip(targets, sizes, strict=True)):
            is_tried = self._may_be_tried and self.is_foreseen is not False
            term = _foreseen(self._loss, each) if is_tried else None
            is_foreseen = self._count is not None or term is not None
            if self.is_foreseen not in (None, is_foreseen):
                raise ValueError(
                    f"loss: what counts in micro-batch {number} does not show from its targets, but did in others. "
                    "Return (sum, count), or give count="
                )
            self.is_foreseen = is_foreseen
            count = size if term is None else term.count
            if self._count is not None:
                count = float(self._count(each))
            self.can_be_empty |= term is not None and term.can_be_empty
            self._parts.append((_checked(count, number), not self._averages if term is None else term.sums))
        return [count for count, _ in self._parts]

    @property
    def kind(self) -> float:
        """Return a number for :func:`total_count`: 0 as long as there was no micro-batch here."""
        return 0.0 if self.is_foreseen is None else 1.0 + self.is_foreseen

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
            term = _Term(self._loss(outputs, targets)) if self.is_plain else _watched(self._loss, outputs, targets)
            value = term.value
            if term.count is not None:
                count, sums = _checked(term.count, number), term.sums
                self.num_unforeseen += 1
            elif not self.is_plain:
                self.is_plain, self._doubt = True, self._doubt_of(term, outputs, targets)
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

    def _doubt_of(self, term: _Term, outputs: Any, targets: Any) -> str | None:
        if term.ignores or _has_ignore_index(self._loss):
            reason = "ignores targets, in a way that is not recognised"
        elif not self._averages:
            reason = "returns a number of which nothing else is known"
        elif not self._may_be_tried:
            reason = "may keep something from call to call, so that it is not tried, and nothing else is known of it"
        elif not self._is_mean_of_samples(term.value, outputs, targets):
            reason = "is no mean over samples"
        else:
            return None
        taken = "the mean over a micro-batch's samples" if self._averages else "the sum over all tokens"
        return f"the loss {reason}; it is taken for {taken}. Return (sum, count), or give count=, a function of targets"

    def _is_mean_of_samples(self, value: Any, outputs: Any, targets: Any) -> bool:
        """Whether two halves of a micro-batch give its loss, as far as can be seen."""
        try:
            half, size = len(targets) // 2, len(targets)
            devices = [value.device] if value.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices):
                first, second = (
                    float(self._loss(*map_leaves(lambda tensor, part=part: tensor[part], (outputs, targets))))
                    for part in (slice(half), slice(half, None))
                )
            mean, whole = (half * first + (size - half) * second) / size, float(value.detach())
        except Exception:  # a loss that wants whole micro-batches tells nothing
            return True
        return not half or math.isclose(mean, whole, rel_tol=math.sqrt(torch.finfo(value.dtype).eps))


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply those there are in place, unless by 1."""
    for parameter in parameters if factor != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def total_count(rows: Sequence[Sequence[float]]) -> float:
    """Return what counts in a step on all ranks.

    Args:
        rows: of each rank what counts there, and the :attr:`~CountedLoss.kind` of its loss, or 0.

    Raises:
        ValueError: where nothing counts, and where the targets tell on some ranks only.
    """
    if len({kind for _, kind in rows} - {0.0}) > 1:
        raise ValueError("loss: on some ranks its targets show what counts, on others not. Return (sum, count)")
    total = sum(count for count, _ in rows)
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


class _Outputs(Tensor):
    """In place of outputs that are not there yet: whatever is computed of it is another one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _REAL:
            return super().__torch_function__(func, types, args, kwargs or {})
        return torch.empty(0).as_subclass(_Outputs)


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
        return _Term(total, None if isinstance(count, _Outputs) else count)
    ignores = False
    for result, func, given in watch.calls:
        term = _term_of(value, func, given)
        if result is value:
            return term
        ignores |= term.ignores
    return _Term(value, ignores=ignores)


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
    """What the targets alone tell; None where they do not, or the loss looks at what the outputs are."""
    interpreted = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with interpreted, torch.no_grad(), torch.random.fork_rng([]):
            term = _watched(loss, torch.empty(0).as_subclass(_Outputs), targets)
            return None if term.count is None else term._replace(count=float(term.count))
    except Exception:  # of whatever kind: the loss was made for other outputs
        return None


def _keeps_nothing(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a loss is made of torch's functions and losses, and settings: then more calls change nothing."""
    value = getattr(value, "_torchdynamo_orig_callable", value)  # of a compiled one
    if value is None or id(value) in seen or isinstance(value, _SETTINGS):
        return True
    if isinstance(value, functools.partial):
        if _is_of_torch(value.func):  # its tensors are given to torch alone
            return True
        return all(_keeps_nothing(each, seen) for each in (value.func, *value.args, *value.keywords.values()))
    if not isinstance(value, types.FunctionType) or _is_of_torch(value):
        return _is_of_torch(value)
    codes = [value.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    if any(each.opname in _STORES for code in codes for each in dis.get_instructions(code)):
        return False
    names = {name for code in codes for name in code.co_names}
    if any(re.fullmatch(r"[a-z]\w*_", name) for name in names):  # in place
        return False
    cells = value.__closure__ or ()
    if any(cell == types.CellType() for cell in cells):  # filled later
        return False
    read = [cell.cell_contents for cell in cells]
    read += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    read += [value.__globals__[name] for name in names if name in value.__globals__]
    return all(_keeps_nothing(each, seen | {id(value)}) for each in read)


def _is_of_torch(value: Any) -> bool:
    """Whether it is a function, class or loss of torch, or built in."""
    if isinstance(value, nn.Module):
        kind: Any = None if next(value.parameters(), None) is not None else type(value)
    else:
        kind = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else None
    is_method = not isinstance(getattr(value, "__self__", None), types.ModuleType | None)
    place = str(getattr(kind, "__module__", None) or "builtins").partition(".")[0]
    return kind is not None and not is_method and place in ("torch", "builtins")


def _has_ignore_index(loss: Any) -> bool:
    if isinstance(loss, functools.partial):
        return "ignore_index" in loss.keywords or _has_ignore_index(loss.func)
    modules = loss.modules() if isinstance(loss, nn.Module) else [loss]
    return any(hasattr(module, "ignore_index") for module in modules)


def _checked(count: Any, number: int) -> float:
    value = float(count)
    if not value >= 0.0:
        raise ValueError(f"what counts in micro-batch {number} is {value}: a number of at least 0 is needed")
    return value
