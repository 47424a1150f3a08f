"""Whether an optimizer treats elements, or parameters, independently of each other: only then may they be divided.

Units, shards and layers of a model lie elsewhere after a move. That changes nothing where an element's update depends
on its own gradients and state alone, as in AdamW. Muon, LAMB, Shampoo and Adafactor see whole matrices, LBFGS sees all
parameters at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroresize.optim.trial import NoTrialError, why_elements_differ, why_parameters_differ
from zeroresize.utils.torch_private import step_hooks

_OptimizerT = TypeVar("_OptimizerT", bound=type)

#: Of torch's, those whose step is made of element-wise operations and numbers that are alike for all elements.
_TORCHS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
#: Adam's and SGD's kernels, which need not be compiled for a trial then.
_COLOSSALAIS = ("cpu_adam.CPUAdam", "fused_adam.FusedAdam", "fused_sgd.FusedSGD", "hybrid_adam.HybridAdam")
#: Packages whose step size is a norm over all parameters, and begins so small that a short trial need not show it.
_BY_NORMS = ("dadaptation", "prodigyopt")
#: Packages whose wrappers of optimizers scale and clip, and have the optimizer in this attribute.
_WRAPPERS = {"colossalai": "optim", "accelerate": "optimizer"}
#: Where other wrappers have it.
_WITHIN = ("optim", "optimizer")
#: Whose functions around steps only watch them.
_WATCHING = ("zeroresize", "torch.profiler", "torch.distributed._tools")

_known: set[type] = {getattr(torch.optim, name) for name in _TORCHS}
#: By the user's word.
_elementwise: set[type] = set()
_by_parameter: set[type] = set()


def mark_elementwise(optimizer_class: _OptimizerT) -> _OptimizerT:
    """Say of an optimizer class that it treats every element of a parameter by itself, so that units may move::

        zr.mark_elementwise(MyAdam)

    An element's update must depend on its own gradients and state, and on settings, alone: not on a norm, a mean or a
    product of a matrix, and not on other parameters. It is your word, also for what hangs on its instances, as step
    hooks; torch's such classes are known, and others are tried. Also for a wrapper of optimizers. Subclasses are to be
    marked themselves.

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


def _marked(optimizer_class: _OptimizerT, words: set[type], call: str) -> _OptimizerT:
    if not isinstance(optimizer_class, type):
        raise ValueError(f"{call}({optimizer_class!r}): wanted is the class of an optimizer")
    words.add(optimizer_class)
    return optimizer_class


def why_not_elementwise(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Tell why ``tensors`` that ``optimizer`` steps may not be divided; None where that changes nothing.

    Known are torch's classes and what :func:`mark_elementwise` was given. Any other one is tried: its steps must be,
    bit for bit, those on parts by themselves, and the same whatever gradients other elements have. Of what hangs on an
    instance, a ``step`` in place of its class's or hooks around steps, nothing is known.
    """
    kind = _Kind("element by element", "is not element-wise", "mark_elementwise", why_elements_differ)
    return _why_not(optimizer, tensors, kind)


def why_not_by_parameter(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Tell why ``tensors`` may not be stepped on different ranks; None where that changes nothing.

    As :func:`why_not_elementwise`, of whole parameters: a step on several must be that on each by itself.
    """
    by = "parameter by parameter"
    kind = _Kind(by, f"does not step {by}", "mark_by_parameter", why_parameters_differ, _by_parameter)
    return _why_not(optimizer, tensors, kind)


@dataclass(frozen=True)
class _Kind:
    """Of independence: its name, what one without it does, how a user says so, its trial, and what was said besides."""

    name: str
    lacking: str
    call: str
    trial: Callable[[Optimizer, Iterable[Tensor]], str | None]
    words: Set[type] = frozenset()

    def is_said(self, optimizer: Any) -> bool:
        return type(optimizer) in _elementwise or type(optimizer) in self.words


def _why_not(optimizer: Any, tensors: Iterable[Tensor], kind: _Kind) -> str | None:
    inner = optimizer
    while not isinstance(inner, Optimizer) or _wrapper_of(inner):
        attribute = _wrapper_of(inner)
        within = getattr(inner, attribute, None) if attribute else _within(inner)
        if attribute is None and not kind.is_said(inner):
            if within is None:
                return _unknown(inner, kind, "it is no torch.optim.Optimizer and holds none")
            return _unknown(inner, kind, "it is a wrapper of an optimizer that is not known")
        if within is None:
            return None
        inner = within
    if kind.is_said(inner):
        return None
    if (reason := _why_not_as_its_class(inner)) is not None:
        return _unknown(inner, kind, reason)
    if _is_known(type(inner)):
        return None
    is_named = any(each.__module__.partition(".")[0] in _BY_NORMS for each in type(inner).__mro__)
    try:
        reason = "its step size is a norm over all parameters" if is_named else kind.trial(inner, tensors)
    except NoTrialError as error:
        return _unknown(inner, kind, str(error))
    return None if reason is None else f"the optimizer {_name(inner)} {kind.lacking}: {reason}"


def _unknown(optimizer: Any, kind: _Kind, reason: str) -> str:
    return (
        f"the optimizer {_name(optimizer)} is not known to treat tensors {kind.name}: {reason}. If it does, say so by "
        f"zeroresize.{kind.call}({type(optimizer).__name__})"
    )


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _wrapper_of(optimizer: Any) -> str | None:
    """The attribute of a known host's wrapper that holds the optimizer; None if it is no such wrapper."""
    for kind in type(optimizer).__mro__:
        attribute = _WRAPPERS.get(kind.__module__.partition(".")[0])
        if attribute is not None and isinstance(getattr(optimizer, attribute, None), Optimizer):
            return attribute
    return None


def _within(wrapper: Any) -> Any:
    """What another wrapper holds; None if nothing is known of it."""
    return next((one for one in (getattr(wrapper, name, None) for name in _WITHIN) if one is not None), None)


def _is_known(kind: type) -> bool:
    is_colossalais = kind.__module__.startswith("colossalai.nn.optimizer.") and any(
        f"{kind.__module__}.{kind.__qualname__}".endswith(f".{name}") for name in _COLOSSALAIS
    )
    return kind in _known or is_colossalais


def _why_not_as_its_class(optimizer: Optimizer) -> str | None:
    """What of an instance may make its steps others than its class's, which are known or can be tried."""
    if not _has_step_of_class(optimizer):
        return "its step was replaced on the instance"
    for kind in ("pre", "post"):
        for hook in step_hooks(optimizer, kind):
            where = _module_of(hook)
            if not any(where == one or where.startswith(f"{one}.") for one in _WATCHING):
                shown = getattr(hook, "__qualname__", type(hook).__qualname__)
                return f"a hook {'before' if kind == 'pre' else 'after'} its steps ({where}.{shown}) may do anything"
    return None


def _has_step_of_class(optimizer: Optimizer) -> bool:
    """Also where a learning rate scheduler counts its steps, or a host put back what it had replaced."""
    step = vars(optimizer).get("step")
    if step is None:
        return True
    while True:
        if isinstance(step, MethodType) and step.__self__ is optimizer:
            step = step.__func__
        elif _module_of(step) == "torch.optim.lr_scheduler" and hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        else:
            return step is type(optimizer).step


def _module_of(call: Any) -> str:
    """The file in which a function was written, as functools.wraps() cannot tell."""
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "__func__", call)
    return str(getattr(call, "__globals__", {}).get("__name__") or type(call).__module__)
