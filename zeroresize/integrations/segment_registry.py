"""Which modules hold a segment, by class: a registry to which a user can add."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from zeroresize.integrations.changed_modules import why_changed
from zeroresize.integrations.elementwise import is_elementwise_module
from zeroresize.layers.segment import Segment


class StaysEven(Exception):
    """Raised by an adapter where a module's segment cannot be taken; the reason is told in one log line."""


#: Of a module: the segments in it, with layers as modules (``module.fc1``).
SegmentAdapter = Callable[[Any], Segment | Sequence[Segment]]

_adapters: dict[type, SegmentAdapter] = {}
#: The same by qualified class name, of libraries that are not imported for it.
_known: dict[str, SegmentAdapter] = {}


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
    _known.update(dict.fromkeys(class_names, adapter))


def registered_segments(module: nn.Module) -> Iterator[Segment]:
    """Return the segments that the registry knows in ``module`` itself.

    Raises:
        StaysEven: with the reason, where the module's class is known and this one has none.
    """
    kind = type(module)
    adapter = _adapters.get(kind) or _known.get(f"{kind.__module__}.{kind.__qualname__}")
    if adapter is None:
        return
    segments = adapter(module)
    yield from [segments] if isinstance(segments, Segment) else segments


def is_registered(module: nn.Module) -> bool:
    """Tell whether the registry knows the class of ``module``."""
    kind = type(module)
    return kind in _adapters or f"{kind.__module__}.{kind.__qualname__}" in _known


def require_elementwise(activation: Any) -> None:
    """Check, for adapters, that ``activation``, which a configuration gave to a module, is known to be element-wise.

    Raises:
        StaysEven: if it is not, naming it.
    """
    if not is_elementwise_module(activation):
        name = type(activation).__name__ if isinstance(activation, nn.Module) else repr(activation)
        raise StaysEven(
            f"{name} between the layers is not known to be element-wise: if it is, tell by "
            "zeroresize.integrations.register_elementwise"
        )
    if isinstance(activation, nn.Module) and (changed := why_changed(activation)) is not None:
        raise StaysEven(f"{type(activation).__name__} between the layers {changed}")
