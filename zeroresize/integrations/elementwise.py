"""What computes every feature of its input by itself: modules, functions and methods of tensors.

Between a column- and a row-parallel layer such operations do not mix units, so units may lie on any rank.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: By qualified name, so that no library is imported for it. All of them take one tensor and have no parameters.
_MODULES: set[str] = {
    *(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in (
            nn.AlphaDropout,
            nn.CELU,
            nn.Dropout,
            nn.ELU,
            nn.GELU,
            nn.Hardshrink,
            nn.Hardsigmoid,
            nn.Hardswish,
            nn.Hardtanh,
            nn.Identity,
            nn.LeakyReLU,
            nn.LogSigmoid,
            nn.Mish,
            nn.ReLU,
            nn.ReLU6,
            nn.SELU,
            nn.SiLU,
            nn.Sigmoid,
            nn.Softplus,
            nn.Softshrink,
            nn.Softsign,
            nn.Tanh,
            nn.Tanhshrink,
            nn.Threshold,
        )
    ),
    *(
        f"transformers.activations.{name}"
        for name in (
            "AccurateGELUActivation",
            "ClippedGELUActivation",
            "FastGELUActivation",
            "GELUActivation",
            "LaplaceActivation",
            "LinearActivation",
            "MishActivation",
            "NewGELUActivation",
            "PytorchGELUTanh",
            "QuickGELUActivation",
            "ReLUSquaredActivation",
        )
    ),
    "colossalai.shardformer.layer.dropout.DropoutForParallelInput",
    "colossalai.shardformer.layer.dropout.DropoutForReplicatedInput",
    "zeroresize.layers.unit_dropout.UnitDropout",
}

#: As functions of ``operator``, ``torch`` and ``torch.nn.functional``.
_OPERATORS: frozenset[Any] = frozenset(
    {
        operator.abs,
        operator.add,
        operator.ge,
        operator.gt,
        operator.iadd,
        operator.imul,
        operator.isub,
        operator.itruediv,
        operator.le,
        operator.lt,
        operator.mul,
        operator.neg,
        operator.pos,
        operator.pow,
        operator.sub,
        operator.truediv,
    }
)
_WORDS = """
    abs add addcdiv addcmul atan celu clamp clamp_max clamp_min clamp_max_ clamp_min_ clone contiguous cos detach div
    dropout elu elu_ erf erfc exp exp2 expm1 float half bfloat16 double gelu hardshrink hardsigmoid hardswish hardtanh
    leaky_relu leaky_relu_ lerp log log1p logsigmoid masked_fill maximum minimum mish mul multiply neg pow reciprocal
    relu relu6 relu_ rsqrt selu sigmoid sigmoid_ sign silu sin softplus softshrink softsign sqrt square sub subtract
    tan tanh tanh_ tanhshrink threshold true_divide type_as to where
"""
_NAMES = frozenset(_WORDS.split())
_FUNCTIONS: frozenset[Any] = _OPERATORS | {
    function for name in _NAMES for place in (torch, F) if callable(function := getattr(place, name, None))
}
_METHODS = _NAMES | {f"{name}_" for name in ("add", "clamp", "div", "mul", "neg", "pow", "sub")}

_registered: set[Any] = set()


def register_elementwise(*classes: Any) -> None:
    """Let segments be found that have these modules between their column- and row-parallel layers.

    Such a module takes tensors of one shape, computes each feature (index of the last dimension) from that feature
    alone, and has no parameters or buffers of the features' number. Its subclasses are not meant. Functions are hooks,
    on the layers or on their parameters, that only watch, or compute each element from that element alone. Call alike
    on every rank, before ``convert``.
    """
    _registered.update(classes)


def is_registered_function(function: Any) -> bool:
    """Tell whether a user has registered this very function."""
    return callable(function) and type(function).__hash__ is not None and function in _registered


def is_elementwise_module(module: Any) -> bool:
    """Tell whether ``module``, or a plain function in its place, is known to compute every feature by itself."""
    if not isinstance(module, nn.Module):
        return is_elementwise_function(module)
    kind = type(module)
    return kind in _registered or f"{kind.__module__}.{kind.__qualname__}" in _MODULES


def is_elementwise_function(function: Any) -> bool:
    """Tell whether ``function`` of tensors of one shape is known to compute every feature by itself."""
    return callable(function) and function.__hash__ is not None and function in _FUNCTIONS


def is_elementwise_method(name: str) -> bool:
    """Tell whether the method ``name`` of tensors is known to compute every feature by itself."""
    return name in _METHODS
