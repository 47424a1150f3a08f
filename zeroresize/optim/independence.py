"""Whether an optimizer treats elements, or parameters, independently of each other: only then may they be divided.

Units, shards and layers of a model lie elsewhere after a move. That changes nothing where an element's update depends
on its own gradients and state alone, as in AdamW. Muon, LAMB, Shampoo and Adafactor see whole matrices, LBFGS sees all
parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroresize.optim.optimizers import is_of_host, with_inner
from zeroresize.optim.trial import NoTrialError, why_steps_differ

_OptimizerT = TypeVar("_OptimizerT", bound=type)

#: Of torch's, those whose step is made of element-wise operations and numbers that are alike for all elements.
_TORCHS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
#: Adam's and SGD's kernels, which need not be compiled for a trial then.
_COLOSSALAIS = ("cpu_adam.CPUAdam", "fused_adam.FusedAdam", "fused_sgd.FusedSGD", "hybrid_adam.HybridAdam")

_known: set[type] = {getattr(torch.optim, name) for name in _TORCHS}
#: By the user's word.
_elementwise: set[type] = set()
_by_parameter: set[type] = set()


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


def _marked(optimizer_class: _OptimizerT, words: set[type], call: str) -> _OptimizerT:
    if not isinstance(optimizer_class, type):
        raise ValueError(f"{call}({optimizer_class!r}): wanted is the class of an optimizer")
    words.add(optimizer_class)
    return optimizer_class


def why_not_elementwise(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Tell why ``tensors`` that ``optimizer`` steps may not be divided; None where that changes nothing.

    Known are torch's classes and what :func:`mark_elementwise` was given. Any other one is tried: the steps of an
    element must be, bit for bit, the same whatever gradients other elements have.
    """
    return _why_not(optimizer, tensors, by_element=True)


def why_not_by_parameter(optimizer: Any, tensors: Iterable[Tensor]) -> str | None:
    """Tell why ``tensors`` may not be stepped on different ranks; None where that changes nothing.

    As :func:`why_not_elementwise`, of whole parameters.
    """
    return _why_not(optimizer, tensors, by_element=False)


def steps_by_place(optimizer: Optimizer) -> bool:
    """Return whether an element's step may depend, in its last bit, on where in a tensor it lies.

    Fused kernels on the CPU, and those of float16, compute elements otherwise that no whole vector is left for.
    """
    is_known = type(optimizer) in _known | _elementwise
    pairs = ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])
    of_cpu = ((group, parameter.dtype) for group, parameter in pairs if parameter.device.type == "cpu")
    return any(not is_known or group.get("fused") or dtype == torch.float16 for group, dtype in of_cpu)


def _why_not(optimizer: Any, tensors: Iterable[Tensor], *, by_element: bool) -> str | None:
    said, call = _elementwise, "mark_elementwise"
    by, lacking = "element by element", "is not element-wise"
    if not by_element:
        said, call = _elementwise | _by_parameter, "mark_by_parameter"
        by, lacking = "parameter by parameter", "does not step parameter by parameter"
    inner = optimizer
    try:
        for inner in (held := with_inner(optimizer)):
            if inner is not held[-1] and type(inner) not in said and not is_of_host(inner):
                raise NoTrialError("it is a wrapper of an optimizer that is not known")
        if not isinstance(inner, Optimizer) and type(inner) not in said:
            raise NoTrialError("it is no torch.optim.Optimizer and holds none")
        is_known = type(inner) in said or _is_known(type(inner))
        reason = None if is_known else why_steps_differ(inner, tensors, by_element=by_element)
    except (NoTrialError, ValueError) as error:  # or a wrapper of several
        return (
            f"the optimizer {_name(inner)} is not known to treat tensors {by}: {error}. If it does, say so by "
            f"zeroresize.{call}({type(inner).__name__})"
        )
    return None if reason is None else f"the optimizer {_name(inner)} {lacking}: {reason}"


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _is_known(kind: type) -> bool:
    name = f"{kind.__module__}.{kind.__qualname__}"
    return kind in _known or (name.startswith("colossalai.nn.optimizer.") and name.endswith(_COLOSSALAIS))
