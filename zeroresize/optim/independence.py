"""Whether an optimizer treats elements, or parameters, independently of each other: only then may they be divided.

Units, shards and layers of a model lie elsewhere after a move. That changes nothing where an element's update depends
on its own gradients and state alone, as in AdamW. Muon, LAMB, Shampoo and Adafactor see whole matrices, LBFGS sees all
parameters at once.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_OptimizerT = TypeVar("_OptimizerT", bound=type)

#: Of torch's, those whose step is made of element-wise operations and numbers that are alike for all elements.
_TORCHS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
#: Adam's and SGD's kernels, which need not be compiled for a trial then.
_COLOSSALAIS = ("cpu_adam.CPUAdam", "fused_adam.FusedAdam", "fused_sgd.FusedSGD", "hybrid_adam.HybridAdam")
#: Packages whose wrappers of optimizers scale and clip, and have the optimizer in this attribute.
_WRAPPERS = {"colossalai": "optim", "accelerate": "optimizer"}

_elementwise: set[type] = {getattr(torch.optim, name) for name in _TORCHS}
_by_parameter: set[type] = set()

_SEED = 7
#: Sizes of trial tensors: small for many steps, since some optimizers begin to look at matrices after some; and large
#: for some, since others treat small tensors element by element only.
_TRIALS = ((10, 6, 24), (64, 150, 3))  # rows, columns, steps
_OTHER_SHAPE = (4, 6)  # of a parameter beside the trial's
_LR = 0.05


def mark_elementwise(optimizer_class: _OptimizerT) -> _OptimizerT:
    """Say of an optimizer class that it treats every element of a parameter by itself, so that units may move::

        zr.mark_elementwise(MyAdam)

    An element's update must depend on its own gradients and state, and on settings, alone: not on a norm, a mean or a
    product of a matrix, and not on other parameters. It is your word; torch's such classes are known, and others are
    tried. Also for a wrapper of optimizers. Subclasses are to be marked themselves.

    Returns:
        ``optimizer_class`` itself, so that it is a decorator, too.

    Raises:
        ValueError: for what is no class.
    """
    return _marked(optimizer_class, _elementwise, "mark_elementwise")


def mark_by_parameter(optimizer_class: _OptimizerT) -> _OptimizerT:
    """Say of an optimizer class that it treats every parameter by itself, as Muon does, so layers may change stages.

    A parameter's update must not depend on other parameters. As :func:`mark_elementwise`, which says more.
    """
    return _marked(optimizer_class, _by_parameter, "mark_by_parameter")


def _marked(optimizer_class: _OptimizerT, known: set[type], call: str) -> _OptimizerT:
    if not isinstance(optimizer_class, type):
        raise ValueError(f"{call}({optimizer_class!r}): wanted is the class of an optimizer")
    known.add(optimizer_class)
    return optimizer_class


def why_not_elementwise(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Why ``tensors`` that ``optimizer`` steps may not be divided; None where that changes nothing.

    Known are torch's classes and what :func:`mark_elementwise` was given. Any other one is tried: some steps on a
    tensor must be, bit for bit, those on its two halves by themselves, whatever they are beside.
    """
    return _why_not(optimizer, tensors, _Kind("element by element", "mark_elementwise", _why_halves_differ))


def why_not_by_parameter(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Why ``tensors`` that ``optimizer`` steps may not be stepped on different ranks; None where that changes nothing.

    As :func:`why_not_elementwise`, of whole parameters: a step on several must be that on each by itself.
    """
    kind = _Kind("parameter by parameter", "mark_by_parameter", _why_parameters_differ, _by_parameter)
    return _why_not(optimizer, tensors, kind)


class _NoTrialError(Exception):
    """Why an optimizer could not be tried."""


@dataclass(frozen=True)
class _Kind:
    """Of independence: its name, by which call a user says so, its trial, and classes that have it besides."""

    name: str
    call: str
    trial: Callable[[Optimizer, Mapping[str, Any], Tensor], str | None]
    known: Set[type] = frozenset()

    def is_known(self, optimizer: Any) -> bool:
        return _is_elementwise(type(optimizer)) or type(optimizer) in self.known


def _why_not(optimizer: Any, tensors: Iterable[Tensor], kind: _Kind) -> str | None:
    inner = optimizer
    while not isinstance(inner, Optimizer) or _wrapper_of(inner):
        within = getattr(inner, _wrapper_of(inner) or "optim", None)
        if within is None:
            return None  # nothing steps; others say so
        if not _wrapper_of(inner) and not kind.is_known(inner):
            return _told(inner, kind, "it is a wrapper of an optimizer that is not known")
        inner = within
    if kind.is_known(inner):
        return None
    for settings, tensor in _settings_of(inner, tensors):
        try:
            reason = kind.trial(inner, settings, tensor)
        except _NoTrialError as error:
            reason = str(error)
        if reason is not None:
            return _told(inner, kind, reason)
    return None


def _told(optimizer: Any, kind: _Kind, reason: str) -> str:
    own = type(optimizer)
    return (
        f"the optimizer {own.__module__}.{own.__qualname__} is not known to treat tensors {kind.name}: {reason}. If it "
        f"does, say so by zeroresize.{kind.call}({own.__name__})"
    )


def _wrapper_of(optimizer: Any) -> str | None:
    """The attribute of a known host's wrapper that holds the optimizer; None if it is no such wrapper."""
    for kind in type(optimizer).__mro__:
        attribute = _WRAPPERS.get(kind.__module__.partition(".")[0])
        if attribute is not None and isinstance(getattr(optimizer, attribute, None), Optimizer):
            return attribute
    return None


def _is_elementwise(kind: type) -> bool:
    is_colossalais = kind.__module__.startswith("colossalai.nn.optimizer.") and any(
        f"{kind.__module__}.{kind.__qualname__}".endswith(f".{name}") for name in _COLOSSALAIS
    )
    return kind in _elementwise or is_colossalais


def _settings_of(optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[tuple[dict[str, Any], Tensor]]:
    """The settings with which it steps ``tensors``, each once for tensors of equally many dimensions."""
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    found: dict[str, tuple[dict[str, Any], Tensor]] = {}
    for tensor in tensors:
        if id(tensor) in group_of:
            group = group_of[id(tensor)]
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found.setdefault(f"{min(tensor.dim(), 2)} {tensor.device} {settings}", (settings, tensor))
    return list(found.values())


def _why_halves_differ(optimizer: Optimizer, settings: Mapping[str, Any], like: Tensor) -> str | None:
    for rows, columns, num_steps in _TRIALS:
        whole = _drawn((rows, columns) if like.dim() > 1 else (rows * columns,), num_steps, like)
        other = _drawn(_OTHER_SHAPE, num_steps, like)
        after = _stepped(optimizer, settings, [whole, other])
        for dim in range(whole[0].dim()):
            for size in (0, 2 * whole[0].shape[dim] // 5):  # a rank may have no units
                sizes = size, whole[0].shape[dim] - size
                halves = [[one.split(sizes, dim)[half].clone() for one in whole] for half in (0, 1)]
                parts = [_stepped(optimizer, settings, [half, other]) for half in halves]
                joined = torch.cat([part[0] for part in parts], dim)
                if not torch.equal(joined, after[0]) or not all(torch.equal(part[1], after[1]) for part in parts):
                    shape = tuple(whole[0].shape)
                    return f"in a trial its steps on a tensor {shape} were others than those on its parts {sizes}"
    return None


def _why_parameters_differ(optimizer: Optimizer, settings: Mapping[str, Any], like: Tensor) -> str | None:
    rows, columns, num_steps = _TRIALS[0]
    parameters = [
        _drawn(shape if like.dim() > 1 else (shape[0],), num_steps, like) for shape in ((rows, columns), _OTHER_SHAPE)
    ]
    together = _stepped(optimizer, settings, parameters)
    for one, expected in zip(parameters, together, strict=True):
        (alone,) = _stepped(optimizer, settings, [one])
        if not torch.equal(alone, expected):
            return "in a trial its steps on two parameters were others than those on each by itself"
    return None


def _drawn(shape: Sequence[int], num_steps: int, like: Tensor) -> list[Tensor]:
    """A parameter's values, and its gradient in each step: of different sizes, so that no norm is like another."""
    generator = torch.Generator().manual_seed(_SEED + len(shape) + shape[0])
    dtype = like.dtype if like.dtype is torch.float64 else torch.float32  # rounding would hide what differs
    scales = torch.logspace(-2, 1, shape[0], dtype=dtype).view(-1, *[1] * (len(shape) - 1))
    drawn = torch.randn(num_steps + 1, *shape, generator=generator, dtype=dtype) * scales
    return list(drawn.to(like.device).unbind())


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _stepped(optimizer: Optimizer, settings: Mapping[str, Any], drawn: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The parameters after all steps of an optimizer like ``optimizer``, made anew.

    Raises:
        _NoTrialError: if there is none.
    """
    kind, parameters = type(optimizer), [nn.Parameter(values.clone()) for values, *_ in drawn]
    own = copy.deepcopy(dict(settings))
    if own.get("lr") is not None:  # at the start of a warm-up it is zero
        own["lr"] = _LR
    known = {**optimizer.defaults, **own}
    wanted = {name: known[name] for name in list(inspect.signature(kind.__init__).parameters)[2:] if name in known}
    devices = [parameters[0].device] if parameters[0].is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad(), _on(parameters[0]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would seed devices that are not put back
        if devices:
            torch.cuda.manual_seed(_SEED)
        try:
            trial = kind([{**own, "params": parameters}], **wanted)
        except Exception as error:
            raise _NoTrialError(f"none could be made for a trial ({type(error).__name__}: {error})") from error
        try:
            for gradients in zip(*(gradients for _, *gradients in drawn), strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                trial.step()
        except Exception as error:
            shapes = " and ".join(str(tuple(one.shape)) for one in parameters)
            told = f"a trial step on tensors {shapes} failed ({type(error).__name__}: {error})"
            raise _NoTrialError(told) from error
    if any(one.numel() and torch.equal(one, values) for one, (values, *_) in zip(parameters, drawn, strict=True)):
        raise _NoTrialError("in a trial it did not step")
    return [one.detach() for one in parameters]
