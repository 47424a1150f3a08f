"""What is known of what lies between layers: modules and functions that are element-wise, and classes with segments.

Operations that compute every feature of their input by itself do not mix units, so units may lie on any rank. Modules
are known by qualified name, so that no library is imported for it. Users add to both registries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from zeroresize.layers.segment import Segment

_OF_TORCH = """
    AlphaDropout CELU Dropout ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU
    ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold
"""
_OF_TRANSFORMERS = """
    AccurateGELUActivation ClippedGELUActivation FastGELUActivation GELUActivation LaplaceActivation LinearActivation
    MishActivation NewGELUActivation PytorchGELUTanh QuickGELUActivation ReLUSquaredActivation
"""
#: All of them take one tensor and have no parameters.
_MODULES = {
    *(f"{getattr(nn, name).__module__}.{name}" for name in _OF_TORCH.split()),
    *(f"transformers.activations.{name}" for name in _OF_TRANSFORMERS.split()),
    "colossalai.shardformer.layer.dropout.DropoutForParallelInput",
    "colossalai.shardformer.layer.dropout.DropoutForReplicatedInput",
    "zeroresize.layers.unit_dropout.UnitDropout",
}
#: Functions and methods of tensors of one shape, without underscores; operators also from the right and in place.
_OPERATORS = "add sub mul div truediv pow"
_FUNCTIONS = frozenset(
    f"""
    abs addcdiv addcmul atan celu clamp clamp_max clamp_min clone contiguous cos detach dropout elu erf erfc exp exp2
    expm1 float half bfloat16 double ge gelu gt hardshrink hardsigmoid hardswish hardtanh le leaky_relu lerp log log1p
    logsigmoid lt masked_fill maximum minimum mish multiply neg pos reciprocal relu relu6 rsqrt selu sigmoid sign silu
    sin softplus softshrink softsign sqrt square subtract tan tanh tanhshrink threshold to true_divide type_as where
    {_OPERATORS} {" ".join(f"r{name} i{name}" for name in _OPERATORS.split())}
    """.split()
)


class StaysEven(Exception):
    """Raised by an adapter where a module's segment cannot be taken; the reason is told in one log line."""


#: Of a module: the segments in it, with layers as modules (``module.fc1``).
SegmentAdapter = Callable[[Any], Segment | Sequence[Segment]]

_registered: set[Any] = set()
_adapters: dict[type, SegmentAdapter] = {}
#: The same by qualified class name, of libraries that are not imported for it.
_adapters_by_name: dict[str, SegmentAdapter] = {}


def register_elementwise(*classes: Any) -> None:
    """Let segments be found that have these modules between their column- and row-parallel layers.

    Such a module takes tensors of one shape, computes each feature (index of the last dimension) from that feature
    alone, and has no parameters or buffers of the features' number. Its subclasses are not meant. Functions are hooks,
    on the layers or on their parameters, that only watch, or compute each element from that element alone. Call alike
    on every rank, before ``convert``.
    """
    _registered.update(classes)


def register_segments(module_class: type[nn.Module], adapter: SegmentAdapter) -> None:
    """Tell ``convert`` which segments lie in modules of a class.

    Args:
        module_class: the class itself; subclasses are not meant, since their forward may differ.
        adapter: takes such a module and returns its :class:`~zeroresize.layers.segment.Segment`, or several. Layers are
            given as modules. It may raise :class:`StaysEven` with the reason why this module has none.

    Call alike on every rank, before ``convert``. See docs/adding_a_host.md.

    Raises:
        TypeError: if ``module_class`` is no class of modules.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"register_segments needs a class of torch.nn.Module, found {module_class!r}")
    _adapters[module_class] = adapter


def register_by_name(class_names: Sequence[str], adapter: SegmentAdapter) -> None:
    """Register segments as :func:`register_segments`, for classes of libraries that need not be installed."""
    _adapters_by_name.update(dict.fromkeys(class_names, adapter))


def registered_segments(module: nn.Module) -> Iterator[Segment]:
    """Yield the segments that the registry knows in ``module`` itself."""
    kind = getattr(module, "host_class", type(module))
    adapter = _adapters.get(kind) or _adapters_by_name.get(_name_of(kind))
    if adapter is not None:
        segments = adapter(module)
        yield from [segments] if isinstance(segments, Segment) else segments


def is_registered_function(function: Any) -> bool:
    """Tell whether a user has registered this very function."""
    return callable(function) and type(function).__hash__ is not None and function in _registered


def is_elementwise_module(module: Any) -> bool:
    """Tell whether ``module``, or a plain function in its place, is known to compute every feature by itself."""
    if isinstance(module, nn.Module):
        return type(module) in _registered or _name_of(type(module)) in _MODULES
    return str(getattr(module, "__module__", "")).startswith("torch") and is_elementwise_function(module.__name__)


def name_of_function(function: Any) -> str:
    """Return what a function of torch is called, of an attribute of tensors that attribute."""
    name = str(getattr(function, "__name__", function))
    return str(function.__self__.__name__) if name in ("__get__", "__set__") else name


def is_elementwise_function(name: str) -> bool:
    """Tell whether torch's function, or method of tensors, of this name computes every feature by itself."""
    return name.strip("_") in _FUNCTIONS


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
